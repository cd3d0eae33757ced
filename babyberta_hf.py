"""BabyBERTa to and from Hugging Face: our weights under the names of transformers' RobertaForMaskedLM.

    python babyberta_hf.py export RUN DIR      a softmax run -> a folder for AutoModelForMaskedLM.from_pretrained(DIR)
    python babyberta_hf.py import DIR RUN      such a folder -> a run folder, for eval.py and --init-from

train_babyberta.py has the same as --export-hf=DIR and --import-hf=DIR. transformers itself is not needed. What a folder holds is
never replaced.

Two things differ. Their positions begin behind the padding token's id (2 with BabyBERTa's tokenizer), so their table has rows
in front that no token uses. And they add an embedding of a token's type, of which RoBERTa uses type 0 alone: on the way in it
is added to our positions, on the way out it is 0. What a scorer trains (SSA's b and n) has no place there.
"""

import json
import signal
import sys
import tempfile
from pathlib import Path

from flags import UserError, fail

if __name__ == "__main__":  # before the seconds that importing torch takes
    signal.signal(signal.SIGINT, lambda *_: fail("interrupted; nothing was written", code=130))

import safetensors
import safetensors.torch
import torch

from checkpoint import load_run, load_weights, run_id, save_model
from config import MODEL_PRESETS, ModelConfig
from files import one_line, write_atomically, write_json
from mlm_data import SPECIAL, read_tokenizer
from model import Transformer

EMBEDDINGS, LAYER = "roberta.embeddings.", "roberta.encoder.layer."
# Our name -> theirs, outside the layers and inside one of them; attn.qkv, which they keep in three, apart.
OUTSIDE = {"embed.weight": EMBEDDINGS + "word_embeddings.weight", "norm.weight": EMBEDDINGS + "LayerNorm.weight",
           "norm.bias": EMBEDDINGS + "LayerNorm.bias", "head.dense.weight": "lm_head.dense.weight",
           "head.dense.bias": "lm_head.dense.bias", "head.norm.weight": "lm_head.layer_norm.weight",
           "head.norm.bias": "lm_head.layer_norm.bias", "head.bias": "lm_head.bias"}
INSIDE = {"attn.proj": "attention.output.dense", "norm1": "attention.output.LayerNorm", "ff.up": "intermediate.dense",
          "ff.proj": "output.dense", "norm2": "output.LayerNorm"}
WHOLE = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "max_position_embeddings", "vocab_size")
QKV = [f"attention.self.{name}" for name in ("query", "key", "value")]


# ---- Names ----------------------------------------------------------------------------------------------------------


def to_hf(ours, n_layer, pad):
    """Our state dict under their names."""
    theirs = {name: ours[own] for own, name in OUTSIDE.items()}
    C = ours["embed.weight"].size(1)
    # (context, C) -> (pad + 1 + context, C)
    theirs[EMBEDDINGS + "position_embeddings.weight"] = torch.cat([torch.zeros(pad + 1, C), ours["position.weight"]])
    theirs[EMBEDDINGS + "token_type_embeddings.weight"] = torch.zeros(1, C)
    for i in range(n_layer):
        for kind in ("weight", "bias"):
            for own, name in INSIDE.items():
                theirs[f"{LAYER}{i}.{name}.{kind}"] = ours[f"blocks.{i}.{own}.{kind}"]
            for name, part in zip(QKV, ours[f"blocks.{i}.attn.qkv.{kind}"].chunk(3)):  # (3 C, ...) -> 3 x (C, ...)
                theirs[f"{LAYER}{i}.{name}.{kind}"] = part
    return {name: tensor.detach().cpu().contiguous() for name, tensor in theirs.items()}


def from_hf(theirs, n_layer, pad):
    """Their state dict under our names. Raises KeyError for a tensor that is missing, ValueError for a layer too many."""
    extra = [name for name in theirs if name.startswith(f"{LAYER}{n_layer}.")]
    if extra:
        raise ValueError(f"num_hidden_layers {n_layer}, but there is {extra[0]}")
    ours = {own: theirs[name] for own, name in OUTSIDE.items()}
    ours["position.weight"] = (theirs[EMBEDDINGS + "position_embeddings.weight"][pad + 1:]
                               + theirs[EMBEDDINGS + "token_type_embeddings.weight"][0])
    for i in range(n_layer):
        for kind in ("weight", "bias"):
            for own, name in INSIDE.items():
                ours[f"blocks.{i}.{own}.{kind}"] = theirs[f"{LAYER}{i}.{name}.{kind}"]
            ours[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat([theirs[f"{LAYER}{i}.{name}.{kind}"] for name in QKV])
    return {name: tensor.float() for name, tensor in ours.items()}


# ---- Folders --------------------------------------------------------------------------------------------------------


def save(model, tokenizer_path, folder):
    """Write config.json, model.safetensors and the tokenizer's files into a new folder (one that has just these is left as it
    is). Raises UserError for what is not their model, and for a folder that holds anything else."""
    config, folder = model.config, Path(folder)
    if config.scorer != "softmax" or not config.mlm_head:
        kind = f"{config.scorer} in a " + ("masked language model" if config.mlm_head else "model of another kind")
        raise UserError(f"{folder}: RobertaForMaskedLM is a masked language model with softmax, not {kind}; export a softmax run "
                        "of train_babyberta.py")
    tokenizer = read_tokenizer(tokenizer_path)
    pad, start, end = (tokenizer.token_to_id(SPECIAL[name]) for name in ("pad", "start", "end"))
    about = dict(
        architectures=["RobertaForMaskedLM"], model_type="roberta", vocab_size=config.vocab_size, hidden_size=config.n_embd,
        num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, intermediate_size=config.n_ff,
        hidden_act="gelu", layer_norm_eps=config.norm_eps, max_position_embeddings=config.context + pad + 1,
        type_vocab_size=1, hidden_dropout_prob=config.dropout, attention_probs_dropout_prob=config.dropout,
        initializer_range=0.02, tie_word_embeddings=True, pad_token_id=pad, bos_token_id=start, eos_token_id=end)
    special = dict(bos_token=SPECIAL["start"], eos_token=SPECIAL["end"], cls_token=SPECIAL["start"], sep_token=SPECIAL["end"],
                   unk_token=SPECIAL["unk"], pad_token=SPECIAL["pad"], mask_token=SPECIAL["mask"])
    tensors = to_hf(model.state_dict(), config.n_layer, pad)
    write_new_folder(folder, {
        "model.safetensors": safetensors.torch.save(tensors, metadata={"format": "pt"}),
        "tokenizer.json": Path(tokenizer_path).read_bytes(), "config.json": as_json(about),
        "tokenizer_config.json": as_json(special | dict(tokenizer_class="PreTrainedTokenizerFast",
                                                        model_max_length=config.context))})


def as_json(values):
    return (json.dumps(values, indent=2) + "\n").encode("utf-8")


def require_new(folder):
    """Raise UserError for a folder that holds something: it may be another model."""
    if Path(folder).is_file() or (Path(folder).is_dir() and any(Path(folder).iterdir())):
        raise UserError(f"{folder}: exists and is not empty; choose another folder")


def write_new_folder(folder, contents):
    """name -> bytes as files of a folder that is there whole or not at all. Raises UserError."""
    if folder.is_dir() and {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == contents:
        return
    require_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as unfinished:
            whole = Path(unfinished) / folder.name
            whole.mkdir()
            for name, content in contents.items():
                write_atomically(whole / name, content)
            whole.replace(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from None


def read(folder):
    """(their config, their tensors) of a folder. Raises UserError. Nothing in it is run."""
    folder = Path(folder)
    try:
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if (folder / "pytorch_model.bin").exists() and not (folder / "model.safetensors").exists():
            tensors = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        else:
            tensors = safetensors.torch.load_file(folder / "model.safetensors")
    except (OSError, ValueError, RecursionError, RuntimeError, safetensors.SafetensorError) as error:
        raise UserError(f"{folder}: cannot be read ({one_line(error)}); name a folder with config.json and model.safetensors of a "
                        "RobertaForMaskedLM") from None
    except Exception as error:  # what a foreign file makes torch.load raise
        raise UserError(f"{folder / 'pytorch_model.bin'}: is no file of weights ({type(error).__name__}); it was not run") from None
    if not isinstance(about, dict):
        raise UserError(f"{folder / 'config.json'}: is not a JSON object; name the folder of a RobertaForMaskedLM")
    for name, tensor in tensors.items():
        if not torch.as_tensor(tensor).isfinite().all():
            raise UserError(f"{folder}: {name} is not finite; its weights are damaged, or of a training that went wrong")
    if about.get("model_type") != "roberta" or about.get("hidden_act", "gelu") != "gelu":
        raise UserError(f"{folder}: is a {about.get('model_type')} model, not a RobertaForMaskedLM with GELU; name another folder")
    return about, tensors


def shape_of(about):
    """The fields of our ModelConfig that their config decides. Raises KeyError or ValueError where one is missing or wrong."""
    pad, eps = about.get("pad_token_id", 1), about.get("layer_norm_eps", 1e-12)
    for name, value in {"pad_token_id": pad, **{name: about[name] for name in WHOLE}}.items():
        if type(value) is not int or not 0 <= value < 2**20:
            raise ValueError(f"{name} {value!r}")
    if type(eps) is not float or not 0 < eps < 1:
        raise ValueError(f"layer_norm_eps {eps!r}")
    return dict(n_layer=about["num_hidden_layers"], n_head=about["num_attention_heads"],
                n_kv_head=about["num_attention_heads"], n_embd=about["hidden_size"], n_ff=about["intermediate_size"],
                context=about["max_position_embeddings"] - pad - 1, vocab_size=about["vocab_size"],
                norm_eps=eps)


def load(model, folder):
    """Give our model the weights of a folder; a scorer's scalars stay. Raises UserError where the shapes differ."""
    about, tensors = read(folder)
    try:
        shape = shape_of(about)
        for name, value in shape.items():
            if getattr(model.config, name) != value:
                raise UserError(f"--import-hf={folder}: has {name} {value}, this model {getattr(model.config, name)}; use the same "
                                "shape and tokenizer")
        ours = from_hf(tensors, shape["n_layer"], about.get("pad_token_id", 1))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UserError(f"--import-hf={folder}: lacks or misstates {error}, so it is no whole RobertaForMaskedLM; name another "
                        "folder") from None
    load_weights(model, ours, folder, skip=(".scorer.",))


def import_run(folder, run):
    """Make a run folder of a folder of theirs that has a tokenizer.json. Raises UserError."""
    folder, run = Path(folder), Path(run)
    if run.exists():
        raise UserError(f"{run}: exists; choose another folder")
    theirs, _ = read(folder)
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    try:
        config = ModelConfig(**MODEL_PRESETS["babyberta"] | shape_of(theirs), scorer="softmax")
        model = Transformer(config)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder / 'config.json'}: lacks or misstates {one_line(error)}; name another folder") from None
    if tokenizer.get_vocab_size() != config.vocab_size:
        raise UserError(f"{folder / 'tokenizer.json'}: has {tokenizer.get_vocab_size()} entries, the model {config.vocab_size}; "
                        "they do not belong together")
    load(model, folder)
    try:
        run.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{run}: cannot be made ({error.strerror}); choose another folder") from None
    write_atomically(run / "tokenizer.json", tokenizer.to_str().encode("utf-8"))
    about = dict(flags=dict(preset=f"imported from {folder.name}", data="", steps=0, seed=0), model=config.to_dict(),
                 torch=torch.__version__)
    save_model(run / "model.safetensors", model, 0, run_id(about))
    write_json(run / "config.json", about)


def main(words):
    if words in (["-h"], ["--help"]):
        return print(__doc__)
    if len(words) != 3 or words[0] not in ("export", "import"):
        raise UserError(f"babyberta_hf.py: got {' '.join(words) or 'nothing'}; takes export RUN DIR, or import DIR RUN")
    if words[0] == "import":
        return import_run(words[1], words[2])
    save(load_run(words[1])[0], Path(words[1]) / "tokenizer.json", words[2])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        fail(error)
