"""Named corpora on other machines: which files of which revision, and a download that is checked and can be
interrupted.

A corpus is pinned by a commit of its repository, so its files never change. The Hugging Face hub tells the size and
sha256 of every file of a commit (Git LFS knows a file by its sha256). That listing is recorded at the first download,
beside the files, and from then on nothing that differs is used. GitHub tells a file's size only: its sha256 is taken when it
first arrives, and recorded. Files come one by one, when their turn to be read is
there, over https only. No code of a repository is run: what is read is parquet and plain text.

HF_ENDPOINT=https://... names a mirror of the hub.
"""
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from files import file_sha256, one_line, read_json, write_json
from flags import UserError

TRIES, PATIENCE = 5, 30  # attempts at a file without any progress; seconds without a byte


@dataclass(frozen=True)
class File:
    name: str
    url: str
    size: int  # bytes
    sha256: str | None  # None: recorded when the file first arrives


@dataclass(frozen=True)
class Remote:
    """A folder of a repository at a commit: of the hub, or of GitHub (`names` given here); or one file of another publisher
    (`files` given here)."""

    origin: str  # what is pinned, for people and for the manifest
    n_files: int
    rows: int  # as published; compared when all have been read
    large: bool = False  # too large to be tokenised on the way into training
    ending: str = ".parquet"  # of the names that are taken
    files: tuple[File, ...] = ()
    names: tuple[str, ...] = ()


def on_hub(repository, commit, folder, *counts, **more):
    return Remote(f"{repository}@{commit}/{folder}", *counts, **more)


# Full commit hashes, and the number of rows that the hub shows: documents, but for WikiText lines.
CORPORA = {
    "fineweb": on_hub("HuggingFaceFW/fineweb", "9bb295ddab0e05d785b879661af7260fed5140fc", "sample/10BT", 15, 14_868_862,
                      large=True),
    "fineweb-edu": on_hub("HuggingFaceFW/fineweb-edu", "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9", "sample/10BT", 14,
                          9_672_101, large=True),
    "wikipedia": on_hub("wikimedia/wikipedia", "b04c8d1ceb2f5cd4588862100d08de323dccfbaa", "20231101.en", 41, 6_407_814,
                        large=True),
    # WikiText-2 without <unk>; sources.py puts its articles together. For --ood the test file alone.
    "wikitext": on_hub("Salesforce/wikitext", "b08601e04326c79dfdd32d625aee71d232d685c3", "wikitext-2-raw-v1", 3,
                       44_836),
    "wikitext-test": on_hub("Salesforce/wikitext", "b08601e04326c79dfdd32d625aee71d232d685c3", "wikitext-2-raw-v1", 1,
                            4_358, ending="test-00000-of-00001.parquet"),
    "shakespeare": Remote("karpathy/char-rnn@6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare", 1, 1, files=(
        File("input.txt", "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
             "/data/tinyshakespeare/input.txt", 1_115_394,
             "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),)),
}

GITHUB = "https://raw.githubusercontent.com"
ZORRO = """agreement_determiner_noun-across_1_adjective agreement_determiner_noun-between_neighbors
    agreement_subject_verb-across_prepositional_phrase agreement_subject_verb-across_relative_clause
    agreement_subject_verb-in_question_with_aux agreement_subject_verb-in_simple_question anaphor_agreement-pronoun_gender
    argument_structure-dropped_argument argument_structure-swapped_arguments argument_structure-transitive
    binding-principle_a case-subjective_pronoun ellipsis-n_bar filler-gap-wh_question_object filler-gap-wh_question_subject
    irregular-verb island-effects-adjunct_island island-effects-coordinate_structure_constraint
    local_attractor-in_question_with_aux npi_licensing-matrix_question npi_licensing-only_npi_licensor
    quantifiers-existential_there quantifiers-superlative"""


def on_github(repository, commit, folder, names, rows):
    return Remote(f"{repository}@{commit}/{folder}", len(names), rows, names=tuple(names))


# What is read line by line, a sentence each, and not as documents (mlm_data.py, grammar.py); rows: lines.
SENTENCES = {
    "aochildes": on_github("phueb/BabyBERTa", "dae23f7a968158636f6143e98062e8102902eb4a", "data/corpora", ["aochildes.txt"],
                           893_989),
    "zorro": on_github("phueb/Zorro", "3b62dae0615dcc41114010a7ed755413e5e670db", "sentences/babyberta",
                       [f"{name}.txt" for name in ZORRO.split()], 92_000),
}


# ---- https ----------------------------------------------------------------------------------------------------------


class OnlyHttps(urllib.request.HTTPRedirectHandler):
    """Follows a redirection (the hub sends every large file to a CDN) to https addresses only."""

    def redirect_request(self, request, file, code, message, headers, url):
        require_https(url, "a redirection")
        return super().redirect_request(request, file, code, message, headers, url)


def require_https(url: str, what: str):
    if not url.startswith("https://"):
        raise UserError(f"{what} leads to {url[:200]}, which is not https; nothing was loaded from there")


def connect(url: str, start: int = 0):
    """The open answer to a GET of url from byte `start` on. Certificates are verified (SSL_CERT_FILE adds some)."""
    require_https(url, "this address")
    headers = {"User-Agent": "ssa"} | ({"Range": f"bytes={start}-"} if start else {})
    request = urllib.request.Request(url, headers=headers)
    return urllib.request.build_opener(OnlyHttps).open(request, timeout=PATIENCE)


# ---- Listing and download -------------------------------------------------------------------------------------------


def hub_address(remote: Remote, pattern: str) -> str:
    """An address of a pinned folder at the hub or its mirror."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    return hub + "/" + pattern.format(*remote.origin.split("@"))


LIST, GET = "api/datasets/{}/tree/{}", "datasets/{}/resolve/{}"


def hub_listing(remote: Remote) -> list[dict]:
    """Name, size and sha256 of the files of a pinned folder, as the hub tells them now."""
    url = hub_address(remote, LIST)
    try:
        with connect(url) as answer:
            entries = json.loads(answer.read(2**24))
        found = [{"name": PurePosixPath(entry["path"]).name, "size": int(entry["lfs"]["size"]),
                  "sha256": entry["lfs"]["oid"]}
                 for entry in entries if entry["type"] == "file" and entry["path"].endswith(remote.ending)]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{url}: cannot be listed ({one_line(error)}); check the network, or name a mirror with "
                        "HF_ENDPOINT") from None
    if len(found) != remote.n_files:
        raise UserError(f"{url}: lists {len(found)} files, but {remote.n_files} are published; try another HF_ENDPOINT")
    return sorted(found, key=lambda file: file["name"])


def github_listing(remote: Remote) -> list[dict]:
    """Name and size of the files of a pinned folder, as GitHub tells them now."""
    url = GITHUB
    try:
        found = []
        for name in remote.names:
            url = github_address(remote, name)
            with connect(url) as answer:
                found.append({"name": name, "size": int(answer.headers["Content-Length"]), "sha256": None})
        return found
    except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
        raise UserError(f"{url}: cannot be reached ({one_line(error)}); check the network, or load the files by hand and name "
                        "their path") from None


def github_address(remote: Remote, name: str) -> str:
    return f"{GITHUB}/{remote.origin.replace('@', '/', 1)}/{name}"


def listing(remote: Remote, folder: Path) -> list[File]:
    """The files of a corpus: known here, or recorded in the folder, or else asked for and recorded."""
    if remote.files:
        return list(remote.files)
    path = folder / f"files-{remote.n_files}.json"  # corpora that share a folder list different files of it
    if not path.exists():
        write_json(path, {"origin": remote.origin, "files": (github_listing if remote.names else hub_listing)(remote)})
    files = read_json(path, "delete it, it will be asked for anew")["files"]
    return [File(file["name"], github_address(remote, file["name"]) if remote.names else
                 f"{hub_address(remote, GET)}/{file['name']}", file["size"], file["sha256"]) for file in files]


def record(remote: Remote, folder: Path, name: str):
    """Note the sha256 of a file that has arrived."""
    path = folder / f"files-{remote.n_files}.json"
    values = read_json(path, "delete it, it will be asked for anew")
    for file in values["files"]:
        if file["name"] == name:
            file["sha256"] = file_sha256(folder / name)
    write_json(path, values)


def download(file: File, folder: Path) -> Path:
    """The file in the folder, checked: found there, or else loaded, going on where an interrupted load has stopped."""
    path, part = folder / file.name, folder / f"{file.name}.part"
    if path.exists():
        check(path, file)
    failures = 0
    while not path.exists():
        have = part.stat().st_size if part.exists() else 0
        try:
            if have < file.size:
                load(file, part, have)
            check(part, file)
            part.replace(path)
        except (OSError, http.client.HTTPException) as error:
            failures = 0 if part.exists() and part.stat().st_size > have else failures + 1
            if failures == TRIES or getattr(error, "code", 500) in (401, 403, 404) or isinstance(error, PermissionError):
                raise UserError(f"{file.url}: cannot be loaded to {path} ({one_line(error)}); check the network and "
                                "the disk; the same command continues") from None
            time.sleep(min(2**failures, 20) / 4)
    return path


def load(file: File, part: Path, have: int):
    """Append what is missing of a file to its part of `have` bytes."""
    with connect(file.url, have) as answer:
        have = have if answer.status == 206 else 0  # a server that knows no ranges starts again
        with (open(part, "ab" if have else "wb") as out,
              tqdm(total=file.size, initial=have, unit="B", unit_scale=True, desc=file.name, disable=None) as bar):
            while block := answer.read(min(2**20, file.size - have + 1)):
                have += len(block)
                if have > file.size:
                    break  # longer than it may be: `check` says so
                out.write(block)
                bar.update(len(block))
    if have < file.size:
        raise OSError(f"the connection ended after {have} of {file.size} bytes")
    if have > file.size:
        part.unlink()
        raise UserError(f"{file.url}: is longer than its {file.size} bytes, so it is another file; nothing was kept")


def check(path: Path, file: File):
    """Raise UserError, and remove the file, unless it has the size and sha256 that were published or recorded."""
    if path.stat().st_size != file.size or file.sha256 not in (None, file_sha256(path)):
        path.unlink()
        raise UserError(f"{path}: its size or sha256 is not the one known of {file.url}; it was removed, the same "
                        "command loads it again")


def fetch(name: str, cache_dir: Path) -> Iterator[Path]:
    """The files of a named corpus in order, each downloaded when it is asked for."""
    remote = (CORPORA | SENTENCES)[name]
    # Named by the commit too: files of another revision must never mix with these.
    _, repository, part = remote.origin.split("/", 2)
    folder = cache_dir / "downloads" / repository.replace("@", "-") / part.replace("/", "-")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({one_line(error)}); choose another --cache-dir") from None
    for file in listing(remote, folder):
        if "/" in file.name or "\\" in file.name or file.name.startswith("."):
            raise UserError(f"{folder}: a listed file is called {file.name!r}, no plain name; delete the folder")
        path = download(file, folder)
        if file.sha256 is None:
            record(remote, folder, file.name)
        yield path
