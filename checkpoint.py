"""What a run leaves on disk, and how it is trusted again.

    config.json           flags, model shape, decisions, digest of the data      (checksum inside)
    model.safetensors     the weights, loadable anywhere with strict=True        (checksum inside, over every tensor)
    resume-00000200.pt    weights, optimiser and random state after step 200     (checksum beside it, in .sha256)

A checkpoint counts only when its .sha256 file is there and fits, and that file is written last: so a process may be killed
at any moment. The last two are kept. Weights and checkpoints name their run (`run_id`). Nothing is unpickled except by
torch.load(weights_only=True), after its checksum.
"""

import hashlib
import io
import json
import zipfile
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from config import ModelConfig
from files import one_line, read_json, sha256, write_atomically
from flags import NOT_TRAINING, UserError
from model import Transformer

KEEP = 2


def run_id(config):
    """Of a config.json: sha256 over all that decides what is trained. The weights carry it, so that those of another run are not
    taken for this one's. A run that is repeated, or moved, keeps it."""
    flags = config.get("flags")
    if isinstance(flags, dict):
        flags = {name: value for name, value in flags.items() if name not in (*NOT_TRAINING, "data", "cache_dir")}
    return sha256(json.dumps([flags, config.get("model"), config.get("data")], sort_keys=True).encode("utf-8"))


# ------------------------------------------------------------------------------------------------------ model.safetensors

def tensors_digest(tensors, about):
    """sha256 over names, dtypes, shapes and bytes of a dict of CPU tensors, and over the dict `about`."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode("utf-8"))
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode("utf-8"))
        digest.update(tensor.flatten().view(torch.uint8).numpy())  # bytes, whatever the dtype
    return digest.hexdigest()


def save_model(path, model, step, run):
    """Write the weights of a Transformer (the raw one, not its compiled wrapper) as safetensors. run: the `run_id`."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    about = {"step": step, "run": run}
    about["sha256"] = tensors_digest(tensors, about)
    # One entry only: safetensors writes several in random order, and equal weights should make equal files.
    write_atomically(path, safetensors.torch.save(tensors, metadata={"about": json.dumps(about)}))


def load_tensors(path, run):
    """(the verified dict of tensors, the step) of a file that `save_model` wrote. run: the `run_id` of the config.json beside it.
    Raises UserError for a file that is missing, damaged or another run's."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except FileNotFoundError:  # what safetensors raises for a file that may not be read, too
        if Path(path).exists():
            raise UserError(f"{path}: cannot be read; check its permissions") from None
        raise UserError(f"{path}: no such file; train the run to its first checkpoint, or name another folder") from None
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: is damaged ({error}); restore it, or train again") from None
    if about.pop("sha256", None) != tensors_digest(tensors, about) or type(about.get("step")) is not int:
        raise UserError(f"{path}: its checksum does not fit, so it is damaged; restore it, or train again")
    if about.get("run", run) != run:  # (files of earlier versions say nothing)
        raise UserError(f"{path}: holds the weights of another run than {path.with_name('config.json')} describes; restore it, "
                        "or train again")
    return tensors, about["step"]


def require_fit(model, tensors, path, skip=()):
    """Raise UserError unless the tensors have the names and shapes of the model's, whatever contains a part in `skip`
    aside. Returns the names that count."""
    own = model.state_dict()
    wanted = {name for name in own if not any(part in name for part in skip)}
    given = {name for name in tensors if not any(part in name for part in skip)}
    for name in sorted(wanted ^ given):
        where = "lacks" if name in wanted else "has in excess"
        raise UserError(f"{path}: {where} {name}, so its model has another shape; use the flags that it was trained with")
    for name in sorted(wanted):
        if own[name].shape != tensors[name].shape:
            raise UserError(f"{path}: {name} is {tuple(tensors[name].shape)}, the model needs {tuple(own[name].shape)}; use "
                            "the flags that it was trained with")
    return wanted


def load_weights(model, tensors, path, skip=()):
    """Load tensors strictly, except names that contain a part in `skip`. Raises UserError naming what does not fit."""
    own, wanted = model.state_dict(), require_fit(model, tensors, path, skip)
    model.load_state_dict({name: tensors.get(name, own[name]) if name in wanted else own[name] for name in own}, strict=True)


def load_run(folder, device="cpu"):
    """(model, config): the trained Transformer of a run folder, in eval mode, and its config.json, with "step": of how many the
    weights are. Raises UserError."""
    folder = Path(folder)
    path = folder / "model.safetensors"
    config = read_json(folder / "config.json", "name a run folder that a trainer of this project wrote")
    try:
        shape, run = ModelConfig.from_dict(config["model"]), run_id(config)
        with torch.device("meta"):  # names and shapes alone: whatever size the config claims, it must be the file's
            outline = Transformer(shape)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{folder / 'config.json'}: {one_line(error)}; it was written by another version") from None
    tensors, config["step"] = load_tensors(path, run)
    require_fit(outline, tensors, path)
    model = Transformer(shape)
    load_weights(model, tensors, path)
    return model.to(device).eval(), config


# ------------------------------------------------------------------------------------------------------------ checkpoints

def _checkpoint_path(folder, step):
    return Path(folder) / f"resume-{step:08d}.pt"


def _checksum_path(path):
    return path.with_name(path.name + ".sha256")


def _checksum_line(path, content):
    return f"{sha256(content)}  {path.name}\n".encode("utf-8")  # as `sha256sum` writes it, so `sha256sum -c` can check it too


def save_checkpoint(folder, step, model, state, run):
    """Write checkpoint `step` (state: what `load_checkpoint` shall return) and the model; drop all but the last two. run: the
    `run_id`."""
    buffer = io.BytesIO()
    torch.save({**state, "step": step, "run": run}, buffer)
    path = _checkpoint_path(folder, step)
    write_atomically(path, buffer.getvalue())
    write_atomically(_checksum_path(path), _checksum_line(path, buffer.getvalue()))
    save_model(Path(folder) / "model.safetensors", model, step, run)
    for old in sorted(Path(folder).glob("resume-*.pt"))[:-KEEP]:
        _checksum_path(old).unlink(missing_ok=True)  # first: without it the checkpoint no longer counts
        old.unlink(missing_ok=True)


def load_checkpoint(folder, run):
    """(step, state, complaints) of the newest whole checkpoint of the run with this `run_id`; (0, None, complaints) where there
    is none yet.

    complaints: a line for every newer checkpoint that is damaged or another run's. Raises UserError when all are, or are gone.
    """
    complaints = []
    for path in sorted(Path(folder).glob("resume-*.pt"), reverse=True):
        checksum = _checksum_path(path)
        if not checksum.exists():
            continue  # the process died between the two files: the one before is the last that was promised
        try:
            content = path.read_bytes()
        except OSError as error:
            complaints.append(f"{path}: cannot be read ({error.strerror})")
            continue
        if checksum.read_bytes() != _checksum_line(path, content):
            complaints.append(f"{path}: its checksum does not fit, so it is damaged")
            continue
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as parts:  # torch packs without compressing; a bomb would grow
                if sum(part.file_size for part in parts.infolist()) > len(content):
                    raise ValueError("larger inside than outside")
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            state["random"]["cpu"], state["scorer_start"], state["seconds"] + 0.0  # what the caller reads besides `restore`
            size, digest, evaluation = state["metrics"]
            size + 0, digest + "", evaluation.items()
            step, other = int(state["step"]), state["run"] != run
        except Exception as error:  # whatever a foreign file makes torch.load raise: it is refused, with its reason
            complaints.append(f"{path}: is not a checkpoint of this program ({type(error).__name__})")
            continue
        if not other:
            return step, state, complaints
        complaints.append(f"{path}: is a checkpoint of another run than config.json describes")
    if not complaints and (Path(folder) / "model.safetensors").exists():
        complaints.append(f"{folder}: holds model.safetensors, so it had checkpoints, which are gone")
    if complaints:
        raise UserError("; ".join(complaints) + "; no whole checkpoint is left: restore one, or start anew with --overwrite")
    return 0, None, complaints


def restore(model, optimizer, state, where):
    """Give model and optimiser what a checkpoint holds of them. Raises UserError where they do not fit each other."""
    try:
        load_weights(model, state["model"], where)
        optimizer.load_state_dict(state["optimizer"])
        for parameter, moments in optimizer.state.items():
            for name, moment in moments.items():
                if moment.shape not in (parameter.shape, ()):
                    raise ValueError(f"{name} is {tuple(moment.shape)}, its parameter {tuple(parameter.shape)}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: its weights or its optimiser state do not fit ({one_line(error)}); use the flags that it was "
                        "trained with") from None
