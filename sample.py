"""python eval.py sample RUN --prompt="The ": text from a trained model. Only the text, prompt included, goes to stdout."""

import sys
from dataclasses import dataclass

from flags import UserError, require
from trained import RunFlags, load_trained


@dataclass
class Sample(RunFlags):
    """Continue a prompt with a trained model."""

    prompt: str = ""
    """the text to go on from"""
    tokens: int = 200
    """most tokens to add; an end-of-text token ends the text before"""
    temperature: float = 0.8
    """below 1 likely tokens become likelier still; 0: always the likeliest"""
    top_k: int = 50
    """draw among so many likeliest tokens (0: among all)"""
    seed: int = 0
    """the same seed gives the same text"""

    def check(self):
        require(self, "prompt", self.prompt, "is empty; give some text to go on from")
        try:
            self.prompt.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError("--prompt: is not valid UTF-8; check the terminal's encoding") from None
        require(self, "tokens", 1 <= self.tokens <= 10**6, "must be between 1 and 1000000")
        require(self, "temperature", 0 <= self.temperature < 1e6, "must be a number, at least 0")
        require(self, "top_k", self.top_k >= 0, "must be at least 0")
        require(self, "seed", 0 <= self.seed < 2**63, "must be at least 0 and below 2^63")
        super().check()
        require(self, "runs", len(self.folders()) == 1, "name one run folder")


def main(flags):
    run, = load_trained(flags)
    import torch

    sys.stdout.reconfigure(errors="replace")  # terminals any text
    tokenizer = run.tokenizer
    prompt = torch.from_numpy(tokenizer.document(flags.prompt, end=False).astype("int64"))[None].to(run.device)  # (1, T)
    generator = torch.Generator(run.device).manual_seed(flags.seed)
    tokens = run.model.generate(prompt, flags.tokens, temperature=flags.temperature, top_k=flags.top_k or None,
                                n_tokens=tokenizer.vocab_size, generator=generator)[0].tolist()
    if tokenizer.eot in tokens:
        tokens = tokens[: tokens.index(tokenizer.eot)]
    print(tokenizer.decode(tokens))
