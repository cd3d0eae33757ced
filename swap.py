"""The swap test: a real pretrained model, its softmax taken out and SSA put in. What does it cost, and does training repair it?

    python swap.py FOLDER                       # two minutes; FOLDER has stories260K.bin and tok512.bin
    python swap.py FOLDER --out=results/swap

The model is karpathy's stories260K (llama2.c), 260,000 parameters of the Llama kind trained on TinyStories. It is loaded into
transformers' LlamaForCausalLM and writes its own texts: one set to fit b and n and to train on, another to judge by. For each
way of putting SSA in, the loss on the second set before and after the same short fine-tuning; softmax is fine-tuned too, since
training alone changes the loss. The unigram baseline predicts by token frequency.

`swap_test(folder)` returns all numbers as a dict, for notebooks. Needs the extra "hf".
"""

import copy
import struct
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import tyro

from flags import UserError, fail, require, tyro_cli


@dataclass
class SwapFlags:
    folder: tyro.conf.Positional[str] = ""
    """where stories260K.bin and tok512.bin are"""
    texts: int = 512
    """texts that the model writes for training, the first 32 also for fitting; an eighth as many, at least 8, to judge by"""
    length: int = 128
    """tokens in each"""
    steps: int = 150
    """steps of fine-tuning, each on 8 texts"""
    lr: float = 1e-4
    """highest learning rate of the fine-tuning"""
    n_max: float = 8.0
    """largest n that the fit may choose"""
    seed: int = 0
    """seeds the texts, the fit and the order of training"""
    threads: int = 0
    """CPU threads (0: PyTorch's choice)"""
    out: str = ""
    """folder for swap.json (none if empty)"""

    def check(self):
        """Raise UserError for a value that cannot work."""
        for name, least, most in (("texts", 8, 10**5), ("length", 16, 512), ("steps", 1, 10**6), ("seed", 0, 2**63 - 1),
                                  ("threads", 0, 1024)):
            require(self, name, least <= getattr(self, name) <= most, f"must be between {least} and {most}")
        require(self, "lr", 0 < self.lr < 1, "must be between 0 and 1")
        require(self, "n_max", 1 < self.n_max <= 1e6, "must be greater than 1, and at most 1e6")
        if not Path(self.folder, "stories260K.bin").is_file():
            raise UserError(f"{self.folder or 'no folder'}: no stories260K.bin there; name the folder that has it and tok512.bin")


if __name__ == "__main__":  # a wrong flag is answered before torch is imported, which takes seconds
    try:
        FLAGS = tyro_cli(SwapFlags, sys.argv[1:], SwapFlags())
        FLAGS.check()
    except UserError as error:
        fail(error)

import torch  # noqa: E402

import ssa_dropin  # noqa: E402
from files import write_json  # noqa: E402

EPS, THETA = 1e-5, 10000.0  # llama2.c fixes both in its source


# ------------------------------------------------------------------------------------------------------------- loading

def load_stories(folder):
    """(transformers' LlamaForCausalLM, StoriesTokenizer) from stories260K.bin and tok512.bin, in llama2.c's formats.

    Raises UserError for files that are missing or of another size than their header says.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    content = _read(Path(folder) / "stories260K.bin")
    dim, hidden, layers, heads, kv_heads, vocab, context = struct.unpack("<7i", content[:28])
    head = dim // heads
    shapes = {"embed_tokens": (vocab, dim), "input_layernorm": (layers, dim), "q_proj": (layers, dim, dim),
              "k_proj": (layers, kv_heads * head, dim), "v_proj": (layers, kv_heads * head, dim), "o_proj": (layers, dim, dim),
              "post_attention_layernorm": (layers, dim), "gate_proj": (layers, hidden, dim),
              "down_proj": (layers, dim, hidden), "up_proj": (layers, hidden, dim), "norm": (dim,),
              "cos": (context, head // 2), "sin": (context, head // 2)}
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    wanted = 28 + 4 * sum(sizes)
    if len(content) != wanted:
        raise UserError(f"{folder}/stories260K.bin: {len(content)} bytes, but its header wants {wanted}; fetch it anew")
    numbers = torch.frombuffer(bytearray(content[28:]), dtype=torch.float32).split(sizes)
    parts = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), numbers)}
    for name, n in (("q_proj", heads), ("k_proj", kv_heads)):
        # llama2.c rotates dimensions 2i and 2i + 1 of a head together, transformers i and i + head / 2: bring the rows in order.
        rows = parts[name].view(layers, n, head // 2, 2, dim).transpose(2, 3)  # (layers, n, 2, head / 2, dim)
        parts[name] = rows.reshape(layers, n * head, dim)
    config = LlamaConfig(vocab_size=vocab, hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=context,
                         rms_norm_eps=EPS, rope_parameters={"rope_type": "default", "rope_theta": THETA},
                         tie_word_embeddings=True, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(config)
    weights = {"lm_head.weight": parts["embed_tokens"], "model.embed_tokens.weight": parts["embed_tokens"],
               "model.norm.weight": parts["norm"]}
    for name in list(shapes)[1:10]:
        group = "self_attn." if name[1:] == "_proj" else "mlp." if name.endswith("_proj") else ""
        for layer in range(layers):
            weights[f"model.layers.{layer}.{group}{name}.weight"] = parts[name][layer]
    model.load_state_dict(weights)  # strict: every parameter has its numbers
    return model.eval(), StoriesTokenizer(Path(folder) / "tok512.bin", vocab)


def _read(path):
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name the folder that has it") from None


class StoriesTokenizer:
    """Byte-pair encoding as sentencepiece does it: 1 begins a text, 2 ends one, 3 to 258 are the bytes, then pieces by rank."""

    bos, eos = 1, 2

    def __init__(self, path, vocab):
        content, offset = _read(path), 4  # an int32 with the length of the longest piece comes first
        self.pieces, self.scores = [], []
        try:
            for _ in range(vocab):
                score, length = struct.unpack_from("<fi", content, offset)
                self.pieces.append(content[offset + 8:offset + 8 + length])
                self.scores.append(score)
                offset += 8 + length
        except struct.error:
            raise UserError(f"{path}: ends before its {vocab} pieces do; fetch it anew") from None
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}

    def encode(self, text):
        """Token ids of a text, without 1 before and 2 after it."""
        ids = []
        for character in " " + text if text else "":  # sentencepiece puts a space before a text
            piece = character.encode("utf-8")
            ids += [self.ids[piece]] if piece in self.ids else [byte + 3 for byte in piece]
        while True:  # join the neighbours whose union ranks highest, until no union is a piece
            joined = [self.ids.get(self.pieces[a] + self.pieces[b]) for a, b in zip(ids, ids[1:])]
            best = max((i for i, j in enumerate(joined) if j is not None), key=lambda i: self.scores[joined[i]], default=None)
            if best is None:
                return ids
            ids[best:best + 2] = [joined[best]]

    def decode(self, ids):
        """The text of token ids up to the first 2."""
        ids = [int(i) for i in ids]
        ids = ids[:ids.index(self.eos)] if self.eos in ids else ids
        pieces = (bytes([i - 3]) if 3 <= i < 259 else self.pieces[i] for i in ids if i != self.bos)
        return b"".join(pieces).decode("utf-8", errors="replace").removeprefix(" ")


# ------------------------------------------------------------------------------------------------------------ the test

def write_texts(model, count, length, seed):
    """What the model draws from itself at temperature 1: ids (count, length). None ends early; 1 begins another story within."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        start = torch.full((count, 1), StoriesTokenizer.bos)
        return model.generate(start, attention_mask=torch.ones_like(start), do_sample=True, top_k=0, max_new_tokens=length - 1,
                              min_new_tokens=length - 1, pad_token_id=StoriesTokenizer.eos)


def as_batches(texts, size=8):
    """What the model takes, `size` texts at a time: input_ids and labels."""
    return [{"input_ids": part, "labels": part} for part in texts.split(size)]


@torch.no_grad()
def loss_on(model, batches):
    """Nats a token."""
    model.eval()
    return torch.stack([model(**batch).loss for batch in batches]).mean().item()


def fine_tune(model, texts, steps, lr, seed):
    """Train all parameters, b and n included, with AdamW: 8 random texts a step; lr rises for a tenth of them, then falls."""
    model.train()
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(10 * (step + 1), steps - step) / steps)
    for _ in range(steps):
        batch = texts[torch.randint(len(texts), (8,), generator=generator)]
        optimiser.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model.eval()


def unigram_loss(train, test):
    """Nats a token of predicting every token by its frequency in `train` (one added to each count)."""
    counts = torch.bincount(train[:, 1:].flatten(), minlength=512) + 1.0
    return -(counts / counts.sum()).log()[test[:, 1:]].mean().item()


def ways_in(n_max, calibration, seed):
    """name -> function that puts SSA into a softmax model, in place."""
    def fitted(model):
        ssa_dropin.ssa_fit(ssa_dropin.ssa_convert(model), calibration, n_max, seed=seed)

    return {"softmax, for comparison": lambda model: None,
            "SSA near softmax (n = 1024, b = 1/1024)": ssa_dropin.ssa_convert,
            "SSA unfitted (n = 1.5, b = 0.8)": lambda model: ssa_dropin.ssa_convert(model, n=1.5, b=0.8),
            f"SSA fitted (n below {n_max:g})": fitted}


def swap_test(folder, texts=512, length=128, steps=150, lr=1e-4, n_max=8.0, seed=0, progress=print):
    """Put SSA into stories260K in three ways and fine-tune each; -> dict of losses (nats a token), distances, b and n.

    "unigram": the baseline's loss; "ways": name -> "loss", "total_variation" (mean over heads; of softmax from itself 0), the
    same two after fine-tuning, "loss_tuned" and "total_variation_tuned", and then b and n, (layers, heads). Arguments as the
    flags of the same names; progress: called with a line on each way.
    """
    softmax, _ = load_stories(folder)
    train, test = write_texts(softmax, texts, length, seed), write_texts(softmax, max(8, texts // 8), length, seed + 1)
    result = {"unigram": unigram_loss(train, test), "ways": {}}
    progress(f"{'unigram baseline':40} loss {result['unigram']:.4f}")
    for name, put_in in ways_in(n_max, as_batches(train[:32]), seed).items():
        model = copy.deepcopy(softmax)
        put_in(model)
        before = measure(model, as_batches(test), seed)
        fine_tune(model, train, steps, lr, seed)
        after = measure(model, as_batches(test), seed)
        result["ways"][name] = before | {f"{key}_tuned": value for key, value in after.items()}
        progress(f"{name:40} loss {before['loss']:.4f}, tuned {after['loss']:.4f}; total variation "
                 f"{before['total_variation']:.4f}, tuned {after['total_variation']:.4f}")
    return result


def measure(model, batches, seed):
    """The loss, how far the weights are from softmax's of the same scores, and b and n where there are some."""
    if model.config._attn_implementation != "ssa":
        return {"loss": loss_on(model, batches), "total_variation": 0.0}
    distance = ssa_dropin.ssa_distance(model, batches, seed=seed)
    scorers = ssa_dropin.ssa_scorers(model).values()
    return {"loss": distance["loss_ssa"], "total_variation": distance["mean_total_variation"],
            "b": [scorer.b.tolist() for scorer in scorers], "n": [scorer.n.tolist() for scorer in scorers]}


def main():
    from run import machine
    if FLAGS.threads:
        torch.set_num_threads(FLAGS.threads)
    settings = {name: value for name, value in asdict(FLAGS).items() if name not in ("folder", "threads", "out")}
    result = swap_test(FLAGS.folder, **settings)
    if FLAGS.out:
        Path(FLAGS.out).mkdir(parents=True, exist_ok=True)
        about = {"flags": settings, "threads": torch.get_num_threads(), "machine": machine("cpu"),
                 "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        write_json(Path(FLAGS.out) / "swap.json", about | result)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        fail(error)
    except ImportError as error:
        fail(f"{error}; install the extra that has it: pip install -e '.[hf]'")
