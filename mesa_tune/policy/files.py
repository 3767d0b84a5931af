"""Policy files on disk: clear errors, atomic writes, and no overwriting of a file that somebody edited.

A written file has a comment with the checksum of its other lines. A missing or wrong checksum means that
somebody else wrote or edited the file.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from mesa_tune.errors import PolicyError
from mesa_tune.files import replace_file

_CHECKSUM: Final = re.compile(r"^# checksum ([0-9a-f]{16})\b.*\n", re.MULTILINE)
_NOTE: Final = "(once edited, this file is not overwritten without --force)"


def read_text(path: Path) -> str:
    """Return the text of the policy file `path`. Raise PolicyError if there is none, or it is not text."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise PolicyError(
            f"{path}: no such policy file\nmake one with mesa-tune search, or name another file"
        ) from None
    except IsADirectoryError:
        raise PolicyError(
            f"{path}: a folder, not a policy file\nname the file in it, such as {path / 'policy.txt'}"
        ) from None
    except UnicodeDecodeError as error:
        what = f"not a policy: byte {error.start} is no UTF-8 text"
        raise PolicyError(
            f"{path}: {what}\nrestore the file, or make it again with mesa-tune search"
        ) from None
    except OSError as error:
        raise PolicyError(
            f"{path}: cannot be read: {error.strerror}\ncheck the file and its permissions"
        ) from None


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write `text` and its checksum to `path`. Raise PolicyError if that is impossible or not allowed."""
    target = path.resolve()
    if target.is_dir():
        raise PolicyError(
            f"{path}: a folder, not a policy file\nname a file in it, such as {path / 'policy.txt'}"
        )
    if not force and target.exists() and not _is_untouched(path):
        what = "exists, and was edited or is not a policy of mesa-tune's"
        raise PolicyError(f"{path}: {what}\nname another file, or overwrite it with force=True")
    try:
        replace_file(target, stamped(text).encode())
    except OSError as error:
        remedy = "name a file in a folder that exists, can be written and has room"
        raise PolicyError(f"{path}: cannot be written: {error.strerror}\n{remedy}") from None


def stamped(text: str) -> str:
    """Return `text` with its checksum after the comments at the top."""
    lines = text.splitlines(keepends=True)
    top = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "".join([*lines[:top], f"# checksum {_digest(text)} {_NOTE}\n", *lines[top:]])


def _is_untouched(path: Path) -> bool:
    try:
        text = read_text(path).replace("\r\n", "\n")
    except PolicyError:
        return False
    match = _CHECKSUM.search(text)
    return match is not None and match[1] == _digest(text[: match.start()] + text[match.end() :])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
