"""The parts of a policy: rules and the header; and how several rules make the settings of one layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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


class SourceLine(NamedTuple):
    """A line of a policy file."""

    source: str
    number: int
    text: str

    def message(self, what: str) -> str:
        """Return `what` between the file and line number and the text of the line."""
        text = "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in self.text.rstrip())
        shown = text if len(text) <= 50 else text[:49] + "…"
        return f'{self.source}:{self.number}: {what} in "{shown}"'

    def error(self, what: str, remedy: str) -> PolicyError:
        """Return the error for a mistake in this line."""
        return PolicyError(f"{self.message(what)}\n{remedy}")


@dataclass(frozen=True, slots=True)
class Rule:
    """Settings for some layers of one tag, or for whole modules (tag `module`).

    `names` are globs; a rule with names binds by name, and its `indices` are for Mesa's parser only. `keys`
    are the settings that the rule gives, in the order of `LayerSettings`. `source_lines` are the lines of the
    file that it was read from, per key.
    """

    tag: str
    indices: Indices | None
    names: tuple[str, ...] | None
    keys: tuple[tuple[str, Value], ...]
    source_lines: tuple[tuple[str, SourceLine], ...] = field(default=(), compare=False)

    @staticmethod
    def of(
        tag: str,
        indices: Iterable[int] | str | None,
        names: Iterable[str] | None,
        keys: dict[str, Value],
        source_lines: dict[str, SourceLine] | None = None,
    ) -> Rule:
        """Return a rule with sorted indices (a string: all) and without duplicate indices or names."""
        bound: Indices | None = "all" if isinstance(indices, str) else None
        if indices is not None and not isinstance(indices, str):
            bound = tuple(sorted(set(indices)))
        return Rule(
            tag,
            bound,
            None if names is None else tuple(dict.fromkeys(names)),
            tuple((key, keys[key]) for key in KEYS if key in keys),
            tuple((source_lines or {}).items()),
        )

    @property
    def layers_text(self) -> str:
        """The layers as policy.txt lists them: names, `all`, or indices."""
        listed = self.names or self.indices or ()
        return listed if isinstance(listed, str) else " ".join(map(str, listed))

    @property
    def keys_text(self) -> str:
        """The settings in one line: `enable: True, level: 16`."""
        return ", ".join(f"{key}: {value}" for key, value in self.keys)

    @property
    def tiles(self) -> bool:
        """Whether the rule sets slices."""
        return dict(self.keys).get("tile", 1) != 1

    @property
    def reruns(self) -> bool:
        """Whether modules of the rule run again in backward."""
        return dict(self.keys).get("store") == "recompute" or self.tiles

    def binds(self, index: int | None, name: str) -> bool:
        """Return True if the rule is for the layer of its tag with this index and name."""
        if self.names is not None:
            plain, globs = _plain_and_globs(self.names)
            return name in plain or any(fnmatchcase(name, glob) for glob in globs)
        return self.indices == "all" or (self.indices is not None and index in self.indices)

    def bound(self, indices: Mapping[str, int]) -> list[str]:
        """Return the names that the rule binds; `indices`: index of each layer of its tag, by name."""
        if self.names is not None:
            if is_glob("".join(self.names)):
                return [name for name in indices if self.binds(None, name)]
            return [name for name in self.names if name in indices]
        if self.indices == "all":
            return list(indices)
        wanted = frozenset(self.indices or ())
        return [name for name, index in indices.items() if index in wanted]

    def covers(self, name: str) -> bool:
        """Return True if the rule (tag `module`) names the module `name` or a module that contains it."""
        ends = [match.start() for match in re.finditer(r"\.", name)] + [len(name)]
        return any(self.binds(None, name[:end]) for end in ends)

    def starts_at(self, name: str) -> bool:
        """Return True if `name` is listed, or matches a glob while no module that contains it is covered."""
        plain, _ = _plain_and_globs(self.names or ())
        parent = name.rpartition(".")[0] if "." in name else None
        return name in plain or (self.binds(None, name) and not (parent is not None and self.covers(parent)))

    def source_line(self, key: str) -> SourceLine | None:
        """Return the line of `key`, if the rule was read from a file."""
        return dict(self.source_lines).get(key)


def is_glob(name: str) -> bool:
    """Return True if `name` has a wildcard."""
    return "*" in name or "?" in name or "[" in name


@lru_cache(maxsize=4096)
def _plain_and_globs(names: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    # Cached: a search makes thousands of policies, each with hundreds of names without wildcard.
    globs = tuple(name for name in names if is_glob(name))
    return frozenset(names) - frozenset(globs), globs


def fold(rules: Iterable[Rule], *, mesa: bool) -> LayerSettings:
    """Merge the settings of `rules`; later rules win key by key."""
    return _folded(tuple(rule.keys for rule in rules), mesa)


@lru_cache(maxsize=4096)
def _folded(keys: tuple[tuple[tuple[str, Value], ...], ...], mesa: bool) -> LayerSettings:
    # Cached: a search makes thousands of policies, whose rules repeat few settings.
    values: dict[str, Value] = dict(MESA_DEFAULTS) if mesa else {}
    for key, value in (pair for of_rule in keys for pair in of_rule):
        values.pop(_RIVALS.get(key, ""), None)
        values[key] = value
    try:
        return LayerSettings.from_dict(values)
    except ValueError as error:
        text = " ".join(f"{key} {value}" for key, value in values.items())
        raise PolicyError(f"the rules of a layer give `{text}`\n{error}") from None


def finest(candidates: Sequence[LayerSettings]) -> LayerSettings:
    """Return settings as fine as any of `candidates`: exact if one is, else most levels, smallest groups."""
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
        rows=max(settings.rows for settings in candidates),
    )


def _fineness(settings: LayerSettings) -> tuple[bool, int, bool]:
    # `store: offload`, and `store: exact` with `drop` or `rows`, store the elements that they store exactly.
    return settings.store in ("exact", "offload"), settings.level, settings.store == "quantize"


@dataclass(frozen=True, slots=True)
class Header:
    """What a policy was made for; None where the file does not say.

    `fingerprint` is that of the model's layers (names and classes of modules), or the beginning of it.
    `producers`: the layers from whose outputs others derive what they need (`store: derive`), so that the
    first step stores what later ones do. `source_line` is the line of the file with the fingerprint.
    """

    model: str | None = None
    fingerprint: str | None = None
    torch: str | None = None
    batch: int | None = None
    budget: str | None = None
    predicted: str | None = None
    objective: str | None = None
    producers: tuple[str, ...] | None = None
    source_line: SourceLine | None = field(default=None, compare=False, repr=False)

    @property
    def noise_ratio(self) -> float | None:
        """The predicted ratio to the parameters' own noise; None if the file does not say."""
        return self._predicted(r"own noise ratio (\d[\d.e+-]*)")

    @property
    def step_ratio(self) -> float | None:
        """The predicted time of a step over the plain step's; None if the file does not say."""
        return self._predicted(r"step (\d[\d.]*)x")

    def _predicted(self, pattern: str) -> float | None:
        match = re.search(pattern, self.predicted or "")
        return float(match[1]) if match else None

    def lines(self) -> list[str]:
        """Return the comment lines that follow the first line of a policy file."""
        made_for = [
            f"model {_one_line(self.model or 'unnamed')}" if self.model or self.fingerprint else "",
            f"torch {_one_line(self.torch)}" if self.torch else "",
            f"batch {self.batch}" if self.batch is not None else "",
            f"budget {_one_line(self.budget)}" if self.budget else "",
            f"objective {_one_line(self.objective)}" if self.objective else "",
        ]
        if self.fingerprint:
            made_for[0] += f" (layers {_one_line(self.fingerprint)[:16]})"
        first = "  ".join(part for part in made_for if part)
        lines = [f"# {first}"] if first else []
        lines += [f"# predicted: {_one_line(self.predicted)}"] if self.predicted else []
        producers = None if self.producers is None else " ".join(map(_one_line, self.producers))
        return lines + ([] if producers is None else [f"# producers: {producers}".rstrip()])

    @staticmethod
    def read(lines: Iterable[SourceLine]) -> Header:
        """Return the header in comment lines; other comments are ignored."""
        parts: dict[str, str] = {}
        source_line: SourceLine | None = None
        for line in lines:
            text = line.text.strip().lstrip("#").strip()
            for key, pattern in _HEADER_PARTS.items():
                if match := pattern.search(text):
                    parts[key] = match[1]
                    source_line = line if key == "fingerprint" else source_line
        return Header(
            model=parts.get("model"),
            fingerprint=parts.get("fingerprint", "").rstrip("….") or None,
            torch=parts.get("torch"),
            batch=int(parts["batch"]) if "batch" in parts else None,
            budget=parts.get("budget"),
            predicted=parts.get("predicted"),
            objective=parts.get("objective"),
            producers=tuple(parts["producers"].split()) if "producers" in parts else None,
            source_line=source_line,
        )

    def is_for(self, fingerprint: str) -> bool:
        """Return False if the header has the fingerprint of another model's layers."""
        mine = self.fingerprint or ""
        return fingerprint.startswith(mine) or mine.startswith(fingerprint)


NO_HEADER: Final = Header()

_MADE_FOR: Final = r"^(?=model |torch |batch |budget |objective ).*?"
_HEADER_PARTS: Final = {
    "model": re.compile(r"^model (.+?)(?:  | \(layers |$)"),
    "fingerprint": re.compile(r"^model .+? \(layers ([^\s)]+)\)"),
    "torch": re.compile(_MADE_FOR + r"(?:^|  )torch (.+?)(?:  |$)"),
    "batch": re.compile(_MADE_FOR + r"(?:^|  )batch ([0-9]{1,18})(?:  |$)"),
    "budget": re.compile(_MADE_FOR + r"(?:^|  )budget (.+?)(?:  |$)"),
    "objective": re.compile(_MADE_FOR + r"(?:^|  )objective (.+?)(?:  |$)"),
    "predicted": re.compile(r"^predicted: *(.+)"),
    "producers": re.compile(r"^producers:(.*)"),
}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the item of `words` that `word` was probably meant to be."""
    lowered = {choice.lower(): choice for choice in reversed(list(dict.fromkeys(words)))}
    close = get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.55)
    return lowered[close[0]] if close else None


def suggestion(word: str, words: Sequence[str], what: str) -> str:
    """Return `did you mean 'level'?` and the list of `words`, for the last line of a message."""
    near = nearest(word, words)
    return (f"did you mean {near!r}? " if near else "") + f"{what}: {', '.join(words)}"
