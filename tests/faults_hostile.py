"""Files that someone made to do harm. Each is refused with one line or handled, within a gigabyte more memory and a minute;
nothing in it is executed, and nothing is written but into the run folder and the cache.

A case gets a folder with a finished run in r/, its tokens in data/, and outside/ with a file that must stay as it is; it does
its harm and returns the script, its flags, and what the line must say (None: the program must cope). Seals and checksums
are made to fit: they protect against damage, and an attacker can compute them too.
"""

import gzip
import io
import json
import os
import pickle
import resource
import zipfile
from pathlib import Path

import torch

import checkpoint
from conftest import TINY, snapshot
from conftest import command as run_command
from faults_programs import copy_of, short_cuts
from files import read_json, sha256, write_json

HOSTILE = []
RESUME, FRESH = ("train_gpt.py", ["--out=r", "--resume"]), [*TINY, "--out=new"]


def hostile(case):
    HOSTILE.append(case)
    return case


def text(name, content):
    """A case about training on a file of this content."""
    def decorate(part):
        def case(folder):
            (folder / name).write_bytes(content() if callable(content) else content)
            return "train_gpt.py", [*FRESH, f"--data={name}"], part
        case.__name__ = f"{name}"
        return hostile(case)
    return decorate


# ---------------------------------------------------------------------------------------------------------------- checkpoints

class Bomb:
    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return open, (os.path.join(self.folder, "outside", "exploded"), "w")


def put_checkpoint(folder, content):
    """In place of all checkpoints, with a checksum that fits."""
    for path in (folder / "r").glob("resume-*.pt"):
        path.write_bytes(content)
        path.with_name(path.name + ".sha256").write_bytes(checkpoint._checksum_line(path, content))
    return *RESUME, "not a checkpoint of this program"


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def newest(folder):
    return torch.load(sorted((folder / "r").glob("resume-*.pt"))[-1], weights_only=True)


@hostile
def a_pickle_bomb_as_checkpoint(folder):
    return put_checkpoint(folder, pickle.dumps(Bomb(folder)))


@hostile
def a_pickle_bomb_in_a_checkpoint(folder):
    return put_checkpoint(folder, saved({"step": Bomb(folder)}))


@hostile
def a_checkpoint_that_unpacks_to_gigabytes(folder):
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved({"step": torch.zeros(4)}))) as good, zipfile.ZipFile(buffer, "w", 8) as bad:
        for part in good.infolist():
            big = part.filename.endswith("data/0")
            bad.writestr(part.filename, bytes(2**28) if big else good.read(part), compresslevel=1)
    return put_checkpoint(folder, buffer.getvalue())


@hostile
def a_checkpoint_that_is_no_dictionary(folder):
    return put_checkpoint(folder, saved(torch.zeros(3)))


@hostile
def a_checkpoint_of_other_metrics(folder):
    return put_checkpoint(folder, saved(newest(folder) | {"metrics": ["much", "more", "less"]}))


@hostile
def a_checkpoint_without_its_parts(folder):
    return put_checkpoint(folder, saved({"step": 6}))


@hostile
def weights_that_share_one_number(folder):
    state = newest(folder)
    state["model"]["embed.weight"] = torch.zeros(1).expand(10**6, 10**6)
    return *put_checkpoint(folder, saved(state))[:2], "embed.weight is (1000000, 1000000), the model needs"


@hostile
def an_optimiser_of_another_shape(folder):
    state = newest(folder)
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    return *put_checkpoint(folder, saved(state))[:2], "exp_avg is (3,)"


# ---------------------------------------------------------------------------------------------- model.safetensors, config.json

def put_tensors(folder, **tensors):
    path, run = folder / "r" / "model.safetensors", checkpoint.run_id(read_json(folder / "r" / "config.json", ""))
    tensors = {**checkpoint.load_tensors(path, run)[0], **tensors}
    model = type("Model", (), {"state_dict": lambda self: tensors})()
    checkpoint.save_model(path, model, 6, run)
    return "train_gpt.py", [*FRESH, "--init-from=r"], "model.safetensors: "


def change_config(folder, part, **values):
    config = read_json(folder / "r" / "config.json", "")
    config = {**config, part: {**config[part], **values} if values else "nothing of use"}
    write_json(folder / "r" / "config.json", config)
    put_checkpoint(folder, saved(newest(folder) | {"run": checkpoint.run_id(config)}))


@hostile
def weights_of_another_shape(folder):
    return put_tensors(folder, **{"embed.weight": torch.zeros(3, 5)})


@hostile
def a_weight_in_excess(folder):
    return put_tensors(folder, **{"blocks.9.weight": torch.zeros(3)})


@hostile
def a_header_that_claims_a_terabyte(folder):
    header = json.dumps({"embed.weight": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}).encode()
    (folder / "r" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return "train_gpt.py", [*FRESH, "--init-from=r"], "model.safetensors: is damaged"


@hostile
def a_header_longer_than_the_file(folder):
    (folder / "r" / "model.safetensors").write_bytes((2**63 - 1).to_bytes(8, "little") + b"{}")
    return "train_gpt.py", [*FRESH, "--init-from=r"], "model.safetensors: is damaged"


def config_case(part, complaint, command=RESUME, **values):
    def case(folder):
        change_config(folder, part, **values)
        return *command, complaint
    case.__name__ = f"a config with {part} {values}"
    hostile(case)


config_case("flags", "n-embd=1000000000: must be a whole number, at most", n_embd=10**9)
config_case("flags", "GB of memory", n_embd=10**6, n_layer=1000)
config_case("flags", "n-layer=1000000000: must be", n_layer=10**9)
config_case("flags", "--steps=many: cannot be right", steps="many")
config_case("flags", "--scorer=evil: cannot be right", scorer="evil")
config_case("flags", "--out=['r']: cannot be right", out=["r"])
config_case("decisions", "device 'tpu': cannot be right", device="tpu")
config_case("decisions", "threads -1: cannot be right", threads=-1)
config_case("flags", "holds the weights of another run", command=("train_gpt.py", [*FRESH, "--init-from=r"]))
config_case("model", "config.json: ", command=("train_gpt.py", [*FRESH, "--init-from=r"]))


@hostile
def a_config_of_a_hundred_megabytes(folder):
    (folder / "r" / "config.json").write_bytes(b'{"flags": "' + b"a" * 10**8 + b'"}')
    return *RESUME, "config.json: larger than"


@hostile
def a_config_of_brackets(folder):
    (folder / "r" / "config.json").write_bytes(b"[" * 10**6)
    return *RESUME, "config.json: is not JSON"


@hostile
def a_metrics_line_of_brackets(folder):
    with open(folder / "r" / "metrics.jsonl", "r+b") as file:
        file.write(b"[" * 300)
    return *RESUME, "metrics.jsonl: damaged"


# -------------------------------------------------------------------------------------------------------------- token files

def change_manifest(folder, **entry):
    path = next((folder / "data").rglob("manifest.json"))
    manifest = read_json(path, "")
    manifest["splits"]["train"]["shards"][0] |= entry
    write_json(path, manifest)
    return path


@hostile
def a_manifest_that_leads_upwards(folder):
    change_manifest(folder, file="../../outside/train-00000.bin")
    return *RESUME, "is outside the folder"


@hostile
def a_token_file_that_is_a_link(folder):
    path = next((folder / "data").rglob("train-00000.bin"))
    path.rename(folder / "outside.bin")
    path.symlink_to(folder / "outside.bin")
    return *RESUME, "is outside the folder"


@hostile
def a_token_file_that_never_ends(folder):
    path = next((folder / "data").rglob("train-00000.bin"))
    path.unlink()
    os.mkfifo(path)
    return *RESUME, "train-00000.bin: missing"


@hostile
def tokens_beyond_the_vocabulary(folder):
    path = next((folder / "data").rglob("train-00000.bin"))
    content = b"\xff\xff" + path.read_bytes()[2:]
    path.write_bytes(content)
    change_manifest(folder, sha256=sha256(content))
    return "train_gpt.py", FRESH, "train-00000.bin: has token 65535"


@hostile
def a_manifest_of_more_tokens_than_there_are(folder):
    change_manifest(folder, tokens=10**15)
    return "train_gpt.py", FRESH, "train-00000.bin: damaged"


# -------------------------------------------------------------------------------------------------------------------- texts

SOME = "Some words of text, again and again. " * 300
LINES = [json.dumps({"text": f"{SOME[:900]} {i}"}) for i in range(30)]

text("a line of 100 MB.jsonl", lambda: b'{"text": "' + b"a" * 10**8 + b'"}\n')("line 1: longer than")
text("a bomb.jsonl.gz", lambda: gzip.compress(b'{"text": "' + bytes(2**28), 1))("line 1: longer than")
text("brackets.jsonl", b"[" * 10**6 + b"\n")("line 1: broken JSON")
text("a number.jsonl", b'{"text": "a", "id": ' + b"9" * 10**5 + b"}\n")("line 1: broken JSON")
text("half a character.jsonl", b'{"text": "\\ud83d"}\n')("half of a surrogate pair")
text("latin.txt", "déjà vu ".encode("latin-1") * 900)("not UTF-8 at byte 1;")
text("utf-16.txt", SOME.encode("utf-16"))("not UTF-8 at byte 0;")
text("cut.jsonl.gz", gzip.compress("\n".join(LINES).encode())[:-20])("cut.jsonl.gz: cannot be read")
text("no column.parquet", lambda: parquet(words=["a"] * 50))("no column `text` among ['words']")
text("rubbish.parquet", b"PAR1" + bytes(range(256)) * 9 + b"PAR1")("rubbish.parquet: damaged")
text("nothing.txt", b" \n" * 900)("the text is empty")
text("NUL bytes.txt", ("\0" * 99 + SOME).encode())(None)
text("a mark in front.txt", b"\xef\xbb\xbf" + SOME.encode())(None)
text("Windows.txt", SOME.replace(". ", ".\r\n").encode())(None)
text("Windows.jsonl", b"\xef\xbb\xbf" + "\r\n".join(LINES).encode())(None)
text("special tokens.txt", ("<|endoftext|><s>[MASK]" * 300).encode())(None)


def parquet(**columns):
    import pyarrow
    import pyarrow.parquet
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


# -------------------------------------------------------------------------------------------- links in place of what is written

@hostile
def links_in_place_of_what_a_run_writes(folder):
    for name in ("metrics.jsonl", "model.safetensors", "loss.png", "sample.txt", "summary.json"):
        (folder / "r" / name).unlink()
        (folder / "r" / name).symlink_to(folder / "outside" / "precious")
    return "train_gpt.py", [*TINY, "--out=r", "--overwrite"], None


@hostile
def a_link_in_place_of_the_token_file_being_written(folder):
    lines = "".join(json.dumps({"text": f"{SOME} {i}"}) + "\n" for i in range(30))
    (folder / "docs.jsonl").write_text(lines, encoding="utf-8")
    flags = ["docs.jsonl", "--tokenizer=bytes", "--tokens=1e5", "--shard-tokens=1e4", "--workers=1"]
    run_command("data.py", *flags, cwd=folder, before=short_cuts)
    path = next((folder / "data").rglob("docs-jsonl*/train-00003.bin"))
    path.with_name(".train-00003.bin.partial").symlink_to(folder / "outside" / "precious")
    manifest = read_json(path.with_name("manifest.json"), "")
    for shard in manifest["splits"]["train"]["shards"][3:]:
        shard |= {"sha256": None, "bytes": None}
    manifest["splits"]["train"]["next"] = {"document": 2, "used": 100}
    write_json(path.with_name("manifest.json"), {**manifest, "complete": False})
    return "data.py", flags, None


# ------------------------------------------------------------------------------------------------------------------ the check

def limits():
    """In the fork: a gigabyte more address space than now, and a minute of computing."""
    short_cuts()
    if Path("/proc/self/statm").exists():
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, now + 2**30))
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (used + 60, used + 60))


def written(folder):
    """Every file with its size and when it was written (some are too large to compare)."""
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def check(case, run_folder):
    """-> a record; "verdict" is "refused" or "handled", or says what is wrong."""
    with copy_of(run_folder) as folder:
        (folder / "outside").mkdir()
        (folder / "outside" / "precious").write_bytes(b"precious")
        script, flags, part = case(folder)
        before = written(folder)
        done = run_command(script, *flags, cwd=folder, check=False, before=limits)
        after = written(folder)
        lines = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "warning: "))]
        changed = {name for name in before if after.get(name) != before[name]}
        if snapshot(folder / "outside") != {"precious": b"precious"}:
            verdict = "something was written outside"
        elif "Traceback" in done.stderr:
            verdict = "a traceback: " + done.stderr[-1500:]
        elif part is None or lines[:1] and lines[0].startswith("warning") and part in lines[0]:
            verdict = "handled" if done.returncode == 0 else f"exit {done.returncode}: {done.stderr[-500:]}"
        elif done.returncode != 2 or len(lines) != 1 or part not in lines[0]:
            verdict = f"exit {done.returncode}: {lines}"
        else:
            verdict = f"refused, but changed {changed}" if changed else "refused"
    return {"case": case.__name__.replace("_", " "), "verdict": verdict, "said": lines[0] if lines else ""}
