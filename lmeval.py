"""A trained model as EleutherAI's lm-eval wants it: a class that answers three kinds of requests.

    from lmeval import LanguageModel                               registers it under the name "ssa"
    lm_eval.simple_evaluate(model="ssa", model_args={"run": "runs/mine"}, tasks=["piqa"])

lm-eval asks for the log-likelihood of continuations, of whole texts, and for generated text. What it does for GPT-2 is done here:
no token is put before a context unless the context is empty; where context and continuation outgrow the model, the tokens on
the left go and the continuation stays whole. A continuation longer than the model's context, at which lm-eval's own models
stop, is scored in windows that move on by half a context.
"""

import logging
import sys

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
except ImportError as error:
    from flags import UserError
    raise UserError(f'this needs lm-eval ({error}); pip install -c requirements.txt -e ".[train,tasks]"') from None

import torch

from files import one_line
from flags import UserError
from scoring import score_windows, windows
from trained import RunFlags, Trained, load_trained

GENERATED_AT_ONCE = 16  # tokens between two looks for the words that end a generated text


@register_model("ssa")
class LanguageModel(TemplateLM):
    """run: a run folder, or a Trained. The other arguments are those that lm-eval gives its models; batch_size "auto" or 0: what
    fits well. truncated: how many log-likelihoods have lost tokens of their context so far. Raises UserError."""

    def __init__(self, run, device=None, batch_size=0, max_batch_size=None, dtype="float32", threads=0):
        super().__init__()
        if not isinstance(run, Trained):
            device = (device or "auto").split(":")[0]
            if device == "cuda" and not torch.cuda.is_available():
                device = "auto"  # lm-eval's command says cuda wherever it runs, and its own models do the same
            run, = load_trained(RunFlags(runs=str(run), device=device, dtype=dtype, threads=int(threads)))
        self.run, self._device = run, torch.device(run.device)
        self.batch_size = int(batch_size) if str(batch_size).isdigit() else 0
        self.max_length = run.model.config.context
        self.truncated = 0

    @property
    def eot_token_id(self):
        return self.run.tokenizer.eot

    @property
    def tokenizer_name(self):
        return self.run.tokenizer.name

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.run.tokenizer.document(string, end=False).tolist()

    def loglikelihood(self, requests, disable_tqdm=False):
        return super().loglikelihood(requests, disable_tqdm=True)  # the bar of score_windows is enough

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        """[((context, continuation), ids of the context, ids of the continuation)] -> [(log p, greedy)]; greedy: whether each
        token of the continuation is the likeliest."""
        requests = [(texts, context or [self.eot_token_id], continuation) for texts, context, continuation in requests]
        todo = []
        for number, (_, context, continuation) in enumerate(requests):
            stride = self.max_length if len(continuation) <= self.max_length else max(1, self.max_length // 2)
            found = windows(number, len(context) + len(continuation) - 1, self.max_length, stride, first=len(context))
            self.truncated += bool(found) and found[0].start > 0
            todo += found
        results = self._sums([context + continuation for _, context, continuation in requests], todo)
        for (texts, *_), result in zip(requests, results):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """log p of whole texts, each beginning with the end-of-text token; windows as in lm-eval, with its least overlap."""
        texts = [request.args[0] for request in requests]
        sequences = [[self.eot_token_id] + self.tok_encode(text) for text in texts]
        todo = [window for number, ids in enumerate(sequences)
                for window in windows(number, len(ids) - 1, self.max_length, self.max_length)]
        results = [nats for nats, _ in self._sums(sequences, todo)]
        for text, result in zip(texts, results):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), result)
        return results

    def _sums(self, sequences, todo):
        """(log p, greedy) of the scored tokens of every sequence."""
        results = [(0.0, True)] * len(sequences)
        for window, nats, greedy in score_windows(self.run, sequences, todo, self.batch_size, "lm-eval"):
            first = window.scored - window.start - 1
            before, greedy_before = results[window.sequence]
            results[window.sequence] = (before - float(nats[first:].sum(dtype="float64")),
                                        bool(greedy_before and greedy[first:].all()))
        return results

    def generate_until(self, requests, disable_tqdm=False):
        """Text after each context, up to the first of the words in `until`, end of text, or max_gen_toks tokens."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context, options):
        wanted = normalize_gen_kwargs(options)
        until, most = wanted["until"], wanted["max_gen_toks"]
        unknown = set(wanted) - {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}
        if unknown:
            raise UserError(f"generation option {unknown.pop()!r}: is unknown here; there are do_sample, temperature, top_k, "
                            "until, max_gen_toks")
        temperature = wanted.get("temperature", 1.0) if wanted["do_sample"] else 0
        # As in lm-eval the context leaves room for what is generated, where there can be room for both.
        room = self.max_length - most if most < self.max_length else max(1, self.max_length // 2)
        ids = (self.tok_encode(context) or [self.eot_token_id])[-room:]
        tokens, text = torch.tensor([ids], device=self._device), ""  # (1, T)
        while tokens.size(1) - len(ids) < most:
            n_new = min(GENERATED_AT_ONCE, most - (tokens.size(1) - len(ids)))
            tokens = self.run.model.generate(tokens, n_new, temperature=temperature, top_k=wanted.get("top_k"),
                                             n_tokens=self.run.tokenizer.vocab_size)
            new = tokens[0, len(ids):].tolist()
            ended = self.eot_token_id in new
            text = self.run.tokenizer.decode(new[: new.index(self.eot_token_id)] if ended else new)
            if ended or any(word in text for word in until if word):
                break
        text = postprocess_generated_text(text, until, None)
        self.cache_hook.add_partial("generate_until", (context, options), text)
        return text


def command_line(run, argv):
    """lm-eval's own command with this model in it; `run` may be one of lm-eval's flags, such as --help. Raises UserError."""
    sys.argv = ["lm-eval", "run", "--model", "ssa", "--model_args", f"run={run}", *argv]
    if run.startswith("-") or not argv:
        sys.argv = ["lm-eval", "run", run or "--help", *argv]
    try:
        cli_evaluate()
    except (ValueError, KeyError, OSError) as error:  # an unknown task, a file that is not there, no network
        logging.getLogger("lm_eval").debug("", exc_info=True)
        raise UserError(f"lm-eval: {one_line(error)}") from None
