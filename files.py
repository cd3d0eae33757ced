"""Files that are whole or absent: atomic writing, and JSON that carries its own checksum."""

import contextlib
import hashlib
import json
import os
from pathlib import Path

from flags import UserError

LARGEST_JSON = 64 * 2**20  # bytes: nothing this project writes comes near it, so a larger file is not ours


def write_atomically(path, content):
    """Write bytes so that `path` is at any moment the old file or the whole new one, also after a power cut."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # x: a new file, so never one elsewhere that a link of this name points to
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"{path}: cannot be written ({error.strerror}); free some space or choose another folder") from None


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def file_sha256(path):
    """The same of a file of any size."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); check the file or the disk") from None


def one_line(error):
    """What another library had to say, cut to fit into one line of ours."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _canonical(values):
    return json.dumps(values, sort_keys=True, ensure_ascii=True).encode("utf-8")


def write_json(path, values):
    """Write a dict as JSON, its checksum in the field "sha256"."""
    write_atomically(path, _as_text({**values, "sha256": sha256(_canonical(values))}).encode("utf-8"))


def _as_text(sealed):
    return json.dumps(sealed, indent=2, ensure_ascii=False) + "\n"


def read_json(path, remedy):
    """The dict that `write_json` wrote. Raises UserError, ending in `remedy`, for a file missing, damaged or too large."""
    path = Path(path)
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise UserError(f"{path}: larger than {LARGEST_JSON} bytes, so this program did not write it; {remedy}")
        text = path.read_text(encoding="utf-8")
        values = json.loads(text)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is not JSON, so it is damaged; {remedy}") from None
    whole = isinstance(values, dict) and text == _as_text(values)  # to the last blank
    if not whole or values.pop("sha256", None) != sha256(_canonical(values)):
        raise UserError(f"{path}: its checksum does not fit, so it was changed or damaged; {remedy}")
    return values
