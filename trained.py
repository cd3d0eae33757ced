"""Trained runs as an evaluation wants them: found by name, checked, loaded, with their tokenizer.

No torch at the top: flags are answered before it is imported (see eval.py).
"""

import re
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from files import read_json
from flags import UserError, require
from tokens import Tokenizer, get_tokenizer


@dataclass
class RunFlags:
    """What every judgement of trained runs takes. A subcommand's own dataclass inherits this and adds its flags."""

    runs: Positional[str] = ""
    """run folder, or several with commas between them"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to compute"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the matrix products; weights and scores stay float32"""
    threads: int = 0
    """CPU threads (0: PyTorch's choice)"""

    def check(self):
        """Raise UserError for a value that cannot work."""
        require(self, "threads", 0 <= self.threads <= 1024, "must be between 0 and 1024")
        self.folders()
        if hasattr(self, "out"):  # tried now rather than after hours of work, and left as it was
            out = Path(self.out or "runs")
            missing = [folder for folder in (out, *out.parents) if not folder.exists()]
            try:
                out.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=out).close()
            except OSError as error:
                raise UserError(f"--out={out}: cannot be written ({error.strerror}); choose another folder") from None
            for folder in missing:
                folder.rmdir()

    def folders(self):
        """The run folders named, each of which has a config and a model."""
        folders = [Path(name) for name in self.runs.split(",") if name]
        if not folders:
            raise UserError("RUN: missing; name a run folder, such as runs/train_gpt-laptop-ssa-s0")
        for folder in folders:
            try:
                missing = {"config.json", "model.safetensors"} - {path.name for path in folder.iterdir()}
            except (FileNotFoundError, NotADirectoryError) as error:
                problem = "no such folder" if isinstance(error, FileNotFoundError) else "is a file"
                raise UserError(f"{folder}: {problem}; name a run folder that a trainer of this project wrote") from None
            except OSError as error:
                raise UserError(f"{folder}: cannot be read ({error.strerror}); check its permissions") from None
            for name in sorted(missing):
                raise UserError(f"{folder}: has no {name}; name a run folder, trained to its first checkpoint at least")
        doubled = {folder for folder in folders if folders.count(folder) > 1}
        if doubled:
            raise UserError(f"{doubled.pop()}: is named twice; name each run once")
        return folders


def run_names(folders):
    """The folders' names, or whole paths where two share a name."""
    names = [folder.resolve().name for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders)]


def training_of(config, name):
    """What results say of a run's training, from `checkpoint.load_run`'s config. Says so if it is not finished."""
    about = {key: config.get("flags", {}).get(key) for key in ("preset", "data", "steps", "seed")} | {"step": config["step"]}
    if about["steps"] and about["step"] < about["steps"]:
        print(f"note: the weights of {name} are those after step {about['step']} of {about['steps']}")
    return about


@dataclass
class Trained:
    """A trained decoder-only language model. name: of its folder, or the whole path where two folders share a name."""

    name: str
    folder: Path
    model: Any  # model.Transformer, in eval mode, on `device`
    config: dict  # config.json
    tokenizer: Tokenizer
    device: str
    dtype: str

    def about(self):
        """What a result says of its model, for JSON."""
        from run import scorer_values
        return dict(folder=str(self.folder), scorer=self.model.config.scorer, tokenizer=self.tokenizer.name,
                    parameters=self.model.n_parameters(), **training_of(self.config, self.name), **scorer_values(self.model))


def load_trained(flags):
    """The runs that RunFlags name, in order: a list of Trained. Raises UserError for a folder without a model, a damaged one,
    one that another version wrote, and a model that is not a decoder-only language model."""
    import torch

    from run import pick_device
    device, _ = pick_device(flags.device)
    if flags.threads:
        torch.set_num_threads(flags.threads)
    folders = flags.folders()
    return [load_one(folder, name, device, flags.dtype) for folder, name in zip(folders, run_names(folders))]


def load_one(folder, name, device, dtype):
    """The Trained of one folder; errors as in `load_trained`."""
    from checkpoint import load_run

    wanted = "only decoder-only language models, which train_gpt.py trains, can be judged so"
    config = read_json(folder / "config.json", "name a run folder that a trainer of this project wrote")
    shape = config.get("model", {})
    if not (shape.get("causal") and shape.get("vocab_size")):
        raise UserError(f"{folder}: its model is an encoder or has continuous inputs; {wanted}")
    if "tokenizer" not in config.get("flags", {}):
        raise UserError(f"{folder}: its config.json names no tokenizer; {wanted}")
    tokenizer = get_tokenizer(config["flags"]["tokenizer"])
    model, config = load_run(folder, device)
    if model.config.vocab_size < tokenizer.vocab_size:
        raise UserError(f"{folder}: its model has {model.config.vocab_size} tokens, its tokenizer {tokenizer.name} "
                        f"{tokenizer.vocab_size}; they do not belong together")
    return Trained(name, folder, model, config, tokenizer, device, dtype)


def provenance(flags, device):
    """What every result file records: flags, machine, date."""
    from run import machine
    return dict(flags=asdict(flags), machine=machine(device), date=time.strftime("%Y-%m-%d"))


def result_folder(flags, *words):
    """--out, or runs/<words joined>; made if it is not there. Raises UserError where it cannot be."""
    folder = Path(flags.out or "runs/" + re.sub(r"[/\\:]+", "-", "-".join(words))[:150])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out={folder}: cannot be made ({error.strerror}); choose another folder") from None
    return folder
