"""What a policy is made of: rules, the header, and how rules fold into the settings of one layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from mesa_tune.errors import PolicyError
from mesa_tune.policy.settings import KEYS, LayerSettings, Value

MODULE: Final = "module"
MESA_DEFAULTS: Final[dict[str, Value]] = {"enable": False, "ema_decay": 0.9, "quant_groups": 1}

Indices = tuple[int, ...] | Literal["all"]

_RIVALS: Final = {"group_size": "quant_groups", "quant_groups": "group_size"}


class Place(NamedTuple):
    """A line of a policy file."""

    source: str
    number: int
    text: str

    def says(self, what: str) -> str:
        """`what`, with file and line number in front and the line's text behind."""
        text = "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in self.text.rstrip())
        shown = text if len(text) <= 50 else text[:49] + "…"
        return f'{self.source}:{self.number}: {what} in "{shown}"'

    def refuse(self, what: str, remedy: str) -> PolicyError:
        """The error for a mistake in this line."""
        return PolicyError(f"{self.says(what)}\n{remedy}")


@dataclass(frozen=True, slots=True)
class Rule:
    """Settings for some layers of one tag (or for whole modules: tag `module`).

    `names` are globs; a rule that has them binds by name, and its `indices` are for Mesa's parser only.
    `keys` are the settings given, in the order of `LayerSettings`. `places` are the lines it was read from.
    """

    tag: str
    indices: Indices | None
    names: tuple[str, ...] | None
    keys: tuple[tuple[str, Value], ...]
    places: tuple[tuple[str, Place], ...] = field(default=(), compare=False)

    @staticmethod
    def of(
        tag: str,
        indices: Iterable[int] | str | None,
        names: Iterable[str] | None,
        keys: dict[str, Value],
        places: dict[str, Place] | None = None,
    ) -> Rule:
        """The rule in its normal form: indices (a string: all) sorted, names in their order, each once."""
        bound: Indices | None = "all" if isinstance(indices, str) else None
        if indices is not None and not isinstance(indices, str):
            bound = tuple(sorted(set(indices)))
        return Rule(
            tag,
            bound,
            None if names is None else tuple(dict.fromkeys(names)),
            tuple((key, keys[key]) for key in KEYS if key in keys),
            tuple((places or {}).items()),
        )

    def binds(self, index: int | None, name: str) -> bool:
        """True if the rule is for the layer of its tag with this index and name."""
        if self.names is not None:
            plain, globs = _plain_and_globs(self.names)
            return name in plain or any(fnmatchcase(name, glob) for glob in globs)
        return self.indices == "all" or (self.indices is not None and index in self.indices)

    def holds(self, name: str) -> bool:
        """True if the rule, of tag `module`, names the module `name` or one that it lies in."""
        ends = [match.start() for match in re.finditer(r"\.", name)] + [len(name)]
        return any(self.binds(None, name[:end]) for end in ends)

    def begins(self, name: str) -> bool:
        """True if the rule names the module `name`, and, if by a glob, no module that it lies in."""
        plain, _ = _plain_and_globs(self.names or ())
        above = name.rpartition(".")[0] if "." in name else None
        return name in plain or (self.binds(None, name) and not (above is not None and self.holds(above)))

    def place(self, key: str) -> Place | None:
        """The line that gave `key`, if the rule was read from a file."""
        return dict(self.places).get(key)


def is_glob(name: str) -> bool:
    """True if `name` has a wildcard."""
    return any(character in name for character in "*?[")


@lru_cache(maxsize=4096)
def _plain_and_globs(names: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    # Policies that a search makes list hundreds of plain names, and it asks for thousands of policies.
    globs = tuple(name for name in names if is_glob(name))
    return frozenset(names) - frozenset(globs), globs


def fold(rules: Iterable[Rule], *, mesa: bool) -> LayerSettings:
    """The settings that `rules` give together, later ones winning key by key."""
    values: dict[str, Value] = dict(MESA_DEFAULTS) if mesa else {}
    for key, value in (pair for rule in rules for pair in rule.keys):
        values.pop(_RIVALS.get(key, ""), None)
        values[key] = value
    return LayerSettings.from_dict(values)


def finest(candidates: Sequence[LayerSettings]) -> LayerSettings:
    """Settings as fine as any of `candidates`: exact if one is, else most levels and smallest groups."""
    exact = [settings for settings in candidates if settings.exact]
    if exact:
        return exact[0]
    best = max(candidates, key=_fineness)
    sizes = [settings.group_size for settings in candidates if settings.group_size is not None]
    counts = [settings.quant_groups for settings in candidates if settings.quant_groups is not None]
    return replace(
        best,
        group_size=min(sizes) if sizes else None,
        quant_groups=None if sizes else max(counts),
        drop=min(settings.drop for settings in candidates),
    )


def _fineness(settings: LayerSettings) -> tuple[bool, int, bool]:
    # What is stored at all is exact with `store: exact` (beside `drop`) and `store: offload`.
    return settings.store in ("exact", "offload"), settings.level, settings.store == "quantize"


@dataclass(frozen=True, slots=True)
class Header:
    """What a policy was made for; None where the file does not say.

    `fingerprint` is that of the model's layers (names and classes of modules), possibly only its beginning;
    `place` is the line that it was read from.
    """

    model: str | None = None
    fingerprint: str | None = None
    torch: str | None = None
    batch: int | None = None
    budget: str | None = None
    predicted: str | None = None
    place: Place | None = field(default=None, compare=False, repr=False)

    def lines(self) -> list[str]:
        """The comment lines that follow the first line of a policy file."""
        made_for = [
            f"model {_one_line(self.model or 'unnamed')}" if self.model or self.fingerprint else "",
            f"torch {_one_line(self.torch)}" if self.torch else "",
            f"batch {self.batch}" if self.batch is not None else "",
            f"budget {_one_line(self.budget)}" if self.budget else "",
        ]
        if self.fingerprint:
            made_for[0] += f" (layers {_one_line(self.fingerprint)[:16]})"
        first = "  ".join(part for part in made_for if part)
        lines = [f"# {first}"] if first else []
        return lines + ([f"# predicted: {_one_line(self.predicted)}"] if self.predicted else [])

    @staticmethod
    def read(places: Iterable[Place]) -> Header:
        """The header that comment lines hold; other comments are passed over."""
        found: dict[str, str] = {}
        where: Place | None = None
        for place in places:
            text = place.text.strip().lstrip("#").strip()
            for key, pattern in _HEADER_PARTS.items():
                if match := pattern.search(text):
                    found[key] = match[1]
                    where = place if key == "fingerprint" else where
        return Header(
            model=found.get("model"),
            fingerprint=found.get("fingerprint", "").rstrip("….") or None,
            torch=found.get("torch"),
            batch=int(found["batch"]) if "batch" in found else None,
            budget=found.get("budget"),
            predicted=found.get("predicted"),
            place=where,
        )

    def is_for(self, fingerprint: str) -> bool:
        """False if the header names another model's layers than `fingerprint`'s."""
        mine = self.fingerprint or ""
        return fingerprint.startswith(mine) or mine.startswith(fingerprint)


NO_HEADER: Final = Header()

_MADE_FOR: Final = r"^(?=model |torch |batch |budget ).*?"
_HEADER_PARTS: Final = {
    "model": re.compile(r"^model (.+?)(?:  | \(layers |$)"),
    "fingerprint": re.compile(r"^model .+? \(layers ([^\s)]+)\)"),
    "torch": re.compile(_MADE_FOR + r"(?:^|  )torch (.+?)(?:  |$)"),
    "batch": re.compile(_MADE_FOR + r"(?:^|  )batch ([0-9]{1,18})(?:  |$)"),
    "budget": re.compile(_MADE_FOR + r"(?:^|  )budget (.+?)(?:  |$)"),
    "predicted": re.compile(r"^predicted: *(.+)"),
}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The one of `words` that `word` was probably meant to be."""
    known = list(dict.fromkeys(words))
    lowered = {other.lower(): other for other in reversed(known)}
    close = get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.55)
    return lowered[close[0]] if close else None


def suggestion(word: str, words: Sequence[str], what: str) -> str:
    """`did you mean 'level'?` and the list of `words`, for a message's last line."""
    near = nearest(word, words)
    return (f"did you mean {near!r}? " if near else "") + f"{what}: {', '.join(words)}"
