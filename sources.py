"""Where text comes from: files, what every Python carries, and named corpora on other machines (remote.py). A source
gives documents, (id, text) pairs, always the same in the same order.

What a user can get wrong raises `flags.UserError` with one line that names it and says what to do.
"""
import ast
import glob
import gzip
import inspect
import json
import os
import platform
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import remote
from files import file_sha256, one_line, sha256
from flags import UserError

Documents = Iterator[tuple[str, str]]  # (id, text)


# ---- Files of documents ---------------------------------------------------------------------------------------------


def document(where: str, text, doc_id=None) -> tuple[str, str]:
    """(id, text), checked. The id decides the split; without one it is the hash of the text, so that neither order nor
    file name matters and equal texts are never in different splits."""
    if not isinstance(text, str):
        raise UserError(f"{where}: field `text` is a {type(text).__name__}, not a string; correct it")
    if not text.strip():
        raise UserError(f"{where}: the text is empty; remove it or fill it")
    try:
        text_hash, _ = sha256(text.encode("utf-8")), str(doc_id).encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell these, as \ud83d
        raise UserError(f"{where}: text or id has half of a surrogate pair, which is no character; correct it") from None
    return text_hash if doc_id is None else str(doc_id), text


def decode_utf8(data: bytes, where: str, offset: int = 0) -> str:
    try:
        return data.decode("utf-8").removeprefix("\ufeff")  # byte-order mark
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {offset + error.start}; save the file as UTF-8") from None


def read_txt(path: Path) -> Documents:
    """One document, read whole; \\r\\n and \\r become \\n. For text larger than memory use JSON lines."""
    yield document(str(path), decode_utf8(path.read_bytes(), str(path)).replace("\r\n", "\n").replace("\r", "\n"))


def filled(path: Path, records: Iterator[tuple[str, object, object]]) -> Documents:
    """Documents of (where, text, id) records. Large corpora have a few empty texts: left out, and counted on stderr."""
    empty = 0
    for where, text, doc_id in records:
        if isinstance(text, str) and not text.strip():
            empty += 1
        else:
            yield document(where, text, doc_id)
    if empty:
        print(f"note: {path}: {empty} empty texts left out", file=sys.stderr)


def read_jsonl(path: Path) -> Documents:
    """A JSON object a line with `text`, perhaps `id`; blank lines are skipped; .gz is unpacked."""
    return filled(path, jsonl_records(path))


LONGEST_LINE = 32 * 2**20  # bytes of JSON: more than any book; a line takes some ten times as much memory, a .gz unpacks


def jsonl_records(path: Path) -> Iterator[tuple[str, object, object]]:
    """(where, text, id) of every line."""
    offset = 0
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
            where = f"{path} line {number}"
            if len(raw) > LONGEST_LINE:
                raise UserError(f"{where}: longer than {LONGEST_LINE:,} bytes; cut this document into several")
            line, offset = decode_utf8(raw, where, offset).strip(), offset + len(raw)
            if not line:
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: broken JSON ({one_line(error)}); correct this line") from None
            if not isinstance(record, dict) or "text" not in record:
                raise UserError(f"{where}: no field `text`; each line must be an object that has one")
            yield where, record["text"], record.get("id")


def parquet_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, dict]]:
    """(where, row) of a parquet file that has the first column at least, a few rows at a time to bound memory."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: parquet files need pyarrow; pip install pyarrow") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if columns[0] not in names:
                raise UserError(f"{path}: no column `{columns[0]}` among {names[:9]}; rename the one to train on")
            for batch in file.iter_batches(batch_size=256, columns=[name for name in columns if name in names]):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged after row {number} ({one_line(error)}); fetch it again") from None


def read_parquet(path: Path) -> Documents:
    """Column `text`, perhaps `id`."""
    return filled(path, ((where, row["text"], row.get("id")) for where, row in parquet_rows(path, ("text", "id"))))


READERS = {".txt": read_txt, ".jsonl": read_jsonl, ".jsonl.gz": read_jsonl, ".parquet": read_parquet}


def extension(path: Path) -> str | None:
    return next((ending for ending in READERS if path.name.lower().endswith(ending)), None)


def read_files(files: list[Path]) -> Documents:
    for path in files:
        try:
            yield from READERS[extension(path)](path)
        except (OSError, EOFError, zlib.error) as error:  # the last two: a damaged .gz
            raise UserError(f"{path}: cannot be read ({one_line(error)}); check it or fetch it again") from None


# ---- What every Python carries: documentation to train on, source code to be out of distribution --------------------

MIN_DOC_CHARS = 60  # "Return self." and the like teach nothing
PYSOURCE_BYTES = 300_000
SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}


def stdlib() -> dict[str, Path]:
    """The standard library's source files: a name such as "json/decoder.py" -> path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIP]
        # Left out: files written at installation, which hold paths and settings of one machine.
        for name in names:
            if name.endswith(".py") and not name.startswith(("_sysconfig", "sitecustom", "python-config")):
                files[Path(parent, name).relative_to(root).as_posix()] = Path(parent, name)
    return dict(sorted(files.items()))


def parse(path: Path) -> tuple[str, ast.Module]:
    """(text, syntax tree) of a source file, which is not run; both empty where it does not parse."""
    try:
        _, text = next(read_txt(path))
        return text, ast.parse(text)
    except (UserError, OSError, SyntaxError, ValueError, RecursionError):
        return "", ast.parse("")


def docstrings(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.Expr]]:
    """(dotted name, syntax node) of every docstring in and below node."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        name = f"{name}.{getattr(node, 'name', '')}".strip(".")
        if ast.get_docstring(node) is not None:
            yield name, node.body[0]
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # definitions are in statements, never in expressions
            yield from docstrings(child, name)


def pydocs() -> Documents:
    """The reference's topics ("topics/with") and the library's docstrings ("json/decoder.py:JSONDecoder.decode"),
    sorted by id, no text twice."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some Linux distributions leave it out
        topics = {}
    found = [(f"topics/{name}", text) for name, text in topics.items()]
    for name, path in stdlib().items():
        found += [(f"{name}:{dotted}".rstrip(":"), node.value.value) for dotted, node in docstrings(parse(path)[1])]
    first = {}  # text -> the first id that has it
    for doc_id, text in sorted(found):
        if len(text := inspect.cleandoc(text)) >= MIN_DOC_CHARS:
            first.setdefault(text, doc_id)
    if not first:
        raise UserError("pydocs: this Python has neither its documentation nor its source files; use --data=PATH")
    yield from (document(doc_id, text, doc_id) for text, doc_id in first.items())


def pysource() -> Documents:
    """Source files without the lines of their docstrings, in the order of their names' hashes, up to about 300 KB."""
    size = 0
    for name, path in sorted(stdlib().items(), key=lambda item: sha256(item[0].encode("utf-8"))):
        if size < PYSOURCE_BYTES and not name.startswith("pydoc_data/"):  # the topics are training text
            text, tree = parse(path)
            dropped = {line for _, node in docstrings(tree) for line in range(node.lineno, node.end_lineno + 1)}
            code = "\n".join(line for number, line in enumerate(text.split("\n"), 1) if number not in dropped)
            if code.strip():
                yield name, code
                size += len(code.encode("utf-8"))
    if not size:
        raise UserError("pysource: this Python has no source files; use a PATH, or --ood=none")


# ---- Corpora on other machines --------------------------------------------------------------------------------------


def wikitext_articles(path: Path) -> Documents:
    """WikiText's rows are lines; an article begins with a line " = Title = "."""
    lines, where = [], str(path)
    for where, row in parquet_rows(path, ("text",)):
        if re.fullmatch(r" = [^=].*[^=] = \n?", row["text"]) and "".join(lines).strip():
            yield document(where, "".join(lines))
            lines = []
        lines.append(row["text"])
    if lines:
        yield document(where, "".join(lines))


def remote_documents(name: str, cache_dir: Path) -> Documents:
    """The documents of a corpus in remote.CORPORA, its files downloaded one by one as they are read."""
    rows = 0
    for path in remote.fetch(name, cache_dir):
        if name.startswith("wikitext"):
            rows += sum(1 for _ in parquet_rows(path, ("text",)))
            yield from wikitext_articles(path)
        else:
            for rows, found in enumerate(read_files([path]), rows + 1):
                yield found
    if rows != remote.CORPORA[name].rows:
        raise UserError(f"{name}: {rows} rows were read, but {remote.CORPORA[name].rows} are published; delete its folder "
                        f"in {cache_dir / 'downloads'} and load it again")


# ---- Sources --------------------------------------------------------------------------------------------------------

LOCAL = {"pydocs": pydocs, "pysource": pysource}
HELD_OUT = 0.1  # of the documents


@dataclass(frozen=True)
class Source:
    name: str  # readable, part of the folder's name
    files: list[Path]  # whose contents decide the text
    documents: Callable[[], Documents]
    python: str | None = None  # Python's version, where the text depends on it
    one_text: bool = False  # a single .txt is split by position, everything else by document
    origin: str | None = None  # in place of files: a publisher's name and revision, which decide the text
    large: bool = False  # too large to be tokenised on the way into training

    @cached_property
    def contents(self) -> list[str]:
        """What the text is made from: tells whether a prepared folder is still right."""
        return [self.origin] if self.origin else [file_sha256(path) for path in self.files]


def is_held_out(doc_id: str, part: float = HELD_OUT) -> bool:
    """Whether a document is validation text: by the hash of its id, so that neither order nor company matters. What is
    held out at a smaller part is held out at a larger one too."""
    return int(sha256(doc_id.encode("utf-8"))[:8], 16) < part * 2**32


def find_source(data: str, flag: str = "--data", cache_dir: str | Path = "data") -> Source:
    """A name in LOCAL or remote.CORPORA (whose files come into cache_dir when they are read), or a file, a folder
    (searched to any depth) or a glob. A name wins: for a folder that is called pydocs say ./pydocs."""
    if data in LOCAL:
        return Source(data, list(stdlib().values()), LOCAL[data], python=platform.python_version())
    if data in remote.CORPORA:
        return Source(data, [], lambda: remote_documents(data, Path(cache_dir)), origin=remote.CORPORA[data].origin,
                      one_text=data == "shakespeare", large=remote.CORPORA[data].large)
    if os.path.isdir(data):
        paths, problem = filter(extension, Path(data).rglob("*")), "nothing to read in this folder"
    else:
        paths = map(Path, [data] if os.path.isfile(data) else glob.glob(data, recursive=True))
        problem = f"neither a known corpus ({', '.join([*LOCAL, *remote.CORPORA])}) nor a path"
    files = sorted((path for path in paths if path.is_file()), key=lambda path: path.parts)
    if not files:
        raise UserError(f"{flag}={data}: {problem}; name a file, folder or glob with {', '.join(READERS)} files")
    for path in files:
        if not extension(path):
            raise UserError(f"{flag}={path}: unknown extension; it must be one of {', '.join(READERS)}")
    name = re.sub(r"[^A-Za-z0-9]+", "-", Path(data).name).strip("-")[:40] or "text"
    return Source(name, files, lambda: read_files(files), one_text=len(files) == 1 and extension(files[0]) == ".txt")


def documents(source: str) -> Documents:
    """All documents of a source, always in the same order."""
    return find_source(source).documents()
