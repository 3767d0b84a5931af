"""The folder of a run, and writing to it without overwriting the user's files.

The hard part: a command must not destroy a policy edited by hand, or a profile that took an hour. So every
file that we write is noted in `.written.json`, with its inputs, its provenance and the hash of its content. A
file without a note, or with another hash, belongs to the user. Several commands may write to one folder at
once, so the notes change under a lock.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesa_tune.errors import RunError
from mesa_tune.files import dump_json, locked, write_atomically
from mesa_tune.runs.provenance import Made

DEFAULT_RUN = Path("mesa-run")
MADE_BY = "made by"
"""Name of the input in `Origin.about` that says which function wrote a file. Commands have none."""

_NOTES = ".written.json"
_LOCK = ".written.lock"
_NOTE_KEYS = {"inputs", "sha256"}
_REMEDY = "--force overwrites it; --run DIR writes to another folder"


@dataclass(frozen=True)
class Origin:
    """The inputs that a file is made from.

    `inputs`: a `digest` of all inputs. `about`: the inputs in words, so that an error can say which differ.
    `derived`: the file is made only from other files of the run, so it may be overwritten when they change.
    `remedy`: what the user can do instead of overwriting, for the error.
    """

    inputs: str
    about: Mapping[str, str] = field(default_factory=dict)
    derived: bool = False
    remedy: str = _REMEDY


class Run:
    """The folder of a run: its paths, and writing to it without overwriting the user's files.

    The argument `inputs` of a method is a `digest` of everything that a file is made from, or an `Origin`.
    Files are replaced atomically. The methods raise RunError for a file that must not be overwritten and for
    a folder or disk that cannot be written.
    """

    def __init__(self, folder: Path, *, force: bool = False) -> None:
        self.folder = folder
        self.force = force

    @property
    def option(self) -> str:
        """The option ` --run DIR` for the next command on this run; empty for the default folder."""
        return "" if self.folder == DEFAULT_RUN else f" --run {self.folder}"

    @property
    def profile(self) -> Path:
        return self.folder / "profile.json"

    @property
    def study(self) -> Path:
        return self.folder / "study.db"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    @property
    def policy(self) -> Path:
        return self.folder / "policy.txt"

    @property
    def verify(self) -> Path:
        return self.folder / "verify.json"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def comparison(self) -> Path:
        return self.folder / "comparison.html"

    @property
    def figures(self) -> Path:
        return self.folder / "figures"

    def require(self, path: Path, command: str) -> Path:
        """Return `path` if it is a file; else raise RunError with the `command` that writes it."""
        if not path.is_file():
            raise RunError(f"{path}: no such file\nrun `{command}` first, or name another run with --run DIR")
        return path

    def check(self, path: Path, inputs: str | Origin) -> None:
        """Raise RunError unless `path` can be written and is new, or ours with the same inputs, unedited."""
        origin = _origin(inputs)
        self._require_writable()
        if self.force or not path.exists():
            return
        note = self._notes().get(self._key(path))
        if note is None:
            raise RunError(f"{path}: exists, and this run did not write it\n{_REMEDY}")
        if note["inputs"] != origin.inputs and not origin.derived:
            raise RunError(f"{path}: {_why_refused(note, origin)}\n{origin.remedy}")
        if note["sha256"] is not None and note["sha256"] != _hash(path):
            raise RunError(f"{path}: was edited after it was written\n{_REMEDY}")

    def _require_writable(self) -> None:
        """Raise RunError if the folder cannot be written: before hours of measuring, not after them."""
        existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise RunError(f"{existing}: is a file, not a folder\nname a folder with --run DIR")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise RunError(
                f"{existing}: cannot be written\nchange its permissions, or name another with --run DIR"
            )

    def origin(self, path: Path) -> Origin | None:
        """Return from what `path` was made; None if it is not there, not ours, or was edited since."""
        note = self._notes().get(self._key(path)) if path.is_file() else None
        if note is None or note["sha256"] not in (None, _hash(path)):
            return None
        about = note.get("about")
        return Origin(note["inputs"], about if isinstance(about, dict) else {})

    def made(self, path: Path) -> Made | None:
        """Return how `path` was made; None if this is not noted."""
        return Made.from_dict(self._notes().get(self._key(path), {}).get("made"))

    def claim(self, path: Path, inputs: str | Origin) -> None:
        """Check `path`, and note that other code is writing it from `inputs`.

        Until `seal`, any content counts as ours. A database is never sealed.
        """
        origin = _origin(inputs)
        self._require_writable()
        with self._changed_notes() as notes:
            self.check(path, origin)
            notes[self._key(path)] = {
                **notes.get(self._key(path), {}),
                "inputs": origin.inputs,
                "about": dict(origin.about),
                "sha256": None,
            }

    def seal(self, path: Path, made: Made | None = None) -> None:
        """Note the content of a claimed `path` as ours, made now or as `made` says.

        Later changes count as edited by hand.
        """
        with self._changed_notes() as notes:
            notes[self._key(path)] |= {"sha256": _hash(path), "made": (made or Made.now()).to_dict()}

    def write(self, path: Path, content: str | bytes, inputs: str | Origin, made: Made | None = None) -> Path:
        """Write `content` to `path` atomically, note it as ours, and return `path`."""
        self.claim(path, inputs)
        write_atomically(path, content)
        self.seal(path, made)
        return path

    def adopt(self, path: Path, source: Path) -> Path:
        """Copy `source`, a file of another run, to `path` with what is noted there, and return `path`."""
        content = source.read_bytes()
        if not (path.is_file() and path.read_bytes() == content):
            other = Run(source.parent)
            note = other._notes().get(source.name, {"inputs": digest("copy", content)})
            self.write(path, content, Origin(note["inputs"], note.get("about", {})), other.made(source))
        return path

    def _key(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _notes(self) -> dict[str, dict[str, Any]]:
        try:
            notes = json.loads((self.folder / _NOTES).read_text("utf-8"))
        except (OSError, ValueError):
            # Without readable notes every file counts as the user's, which is safe.
            return {}
        pairs = notes.items() if isinstance(notes, dict) else ()
        return {name: note for name, note in pairs if isinstance(note, dict) and note.keys() >= _NOTE_KEYS}

    @contextmanager
    def _changed_notes(self) -> Iterator[dict[str, dict[str, Any]]]:
        """Write the notes after the body, which may change them; no other command changes them meanwhile."""
        with locked(self.folder / _LOCK):
            notes = self._notes()
            yield notes
            write_atomically(self.folder / _NOTES, dump_json(notes))


def _origin(inputs: str | Origin) -> Origin:
    return inputs if isinstance(inputs, Origin) else Origin(inputs)


def _why_refused(note: Mapping[str, Any], origin: Origin) -> str:
    """Return `was made from other inputs (budget 6.00 GB, now 35.3 MB)`, or who has written the file."""
    about = note.get("about")
    noted = about if isinstance(about, dict) else {}
    if noted.get(MADE_BY) != origin.about.get(MADE_BY):
        return f"was written by {noted.get(MADE_BY, 'a command of mesa-tune')}"
    parts = [
        f"{name} {noted[name]}, now {value}"
        for name, value in origin.about.items()
        if name in noted and noted[name] != value
    ]
    return "was made from other inputs" + (f" ({'; '.join(parts)})" if parts else "")


def digest(*parts: object) -> str:
    """Return a hash of `parts`, equal for equal JSON values. Paths and other objects count as their text."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _hash(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except IsADirectoryError:
        return None
