"""What a user does not leave to the search: pinned layers, forbidden stores, settings that may vary."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final

from mesa_tune.errors import PolicyError
from mesa_tune.policy.rules import SourceLine, suggestion
from mesa_tune.policy.settings import EXACT, KEYS, LayerSettings, Value
from mesa_tune.policy.values import read_value, split_words
from mesa_tune.profiles.profile import Profile

Pins = Mapping[str, LayerSettings]
"""Layer name or glob -> the settings that it must have; later pins win."""

FORBIDDEN: Final = ("derive", "recompute", "offload", "tile", "rows", "levels")
"""What can be forbidden: values of `store`, slices, and leaving out rows."""
VARIED: Final = tuple(key for key in KEYS if key != "enable")
"""The settings that a search can be restricted to."""

_DEFAULT = LayerSettings()


@dataclass(frozen=True)
class Restrictions:
    """Limits on what may be chosen for layers that no pin binds. Exact storage is always possible.

    `forbidden`: some of `FORBIDDEN`. `varied`: keys of settings that may differ from their defaults; None:
    all.
    """

    forbidden: frozenset[str] = frozenset()
    varied: frozenset[str] | None = None

    @staticmethod
    def of(forbid: Iterable[str] | None, only: Iterable[str] | None) -> Restrictions:
        """Return the restrictions with these names. Raise PolicyError for an unknown one."""
        forbidden = [] if forbid is None else _words(forbid, "forbid", FORBIDDEN)
        varied = None if only is None else frozenset(_words(only, "only", VARIED))
        return Restrictions(frozenset(forbidden), varied)

    @property
    def derive(self) -> bool:
        """True if layers may derive tensors from one another."""
        return self.allows(LayerSettings(store="derive"))

    @property
    def tile(self) -> bool:
        """True if losses may go backward in slices."""
        return "tile" not in self.forbidden and (self.varied is None or "tile" in self.varied)

    def allows(self, settings: LayerSettings) -> bool:
        """Return True if a layer may have `settings`."""
        if settings.exact:
            return True
        if settings.store in self.forbidden or (settings.rows < 1 and "rows" in self.forbidden):
            return False
        return self.varied is None or all(
            key in self.varied or getattr(settings, key) == getattr(_DEFAULT, key) for key in VARIED
        )

    def to_dict(self) -> dict[str, list[str] | None]:
        """Return plain values for JSON."""
        varied = None if self.varied is None else sorted(self.varied)
        return {"forbid": sorted(self.forbidden), "only": varied}


NO_RESTRICTIONS: Final = Restrictions()


def _words(words: Iterable[str], name: str, known: Sequence[str]) -> list[str]:
    words = split_words(words) if isinstance(words, str) else list(words)
    for word in words:
        if word not in known:
            raise PolicyError(f"{name} {word!r}: unknown\n{suggestion(word, known, 'known are')}")
    return words


def read_pin(text: str) -> tuple[str, LayerSettings]:
    """Return the glob and the settings in `GLOB: SETTINGS`.

    Settings are `exact`, or keys of policy.txt with their values: `level 16 group_size 64`, `store derive`.
    Raise PolicyError for anything else.
    """
    glob, colon, rest = (part.strip() for part in text.rpartition(":"))
    if not (colon and glob and rest):
        raise PolicyError(
            f"pin {text!r}: no `GLOB: SETTINGS`\nwrite it like 'blocks.0.*: level 16', or exact"
        )
    return glob, _settings(SourceLine("pin", 1, text), split_words(rest))


def _settings(line: SourceLine, words: Sequence[str]) -> LayerSettings:
    if list(words) == ["exact"]:
        return EXACT
    values: dict[str, Value] = {}
    for key, value in zip(words[::2], [*words[1::2], *([""] * (len(words) % 2))], strict=True):
        if key not in KEYS:
            raise line.error(f"unknown setting {key!r}", suggestion(key, ["exact", *KEYS], "settings are"))
        values[key] = read_value(line, key, [value] if value else [])
    if {"group_size", "quant_groups"} <= values.keys():
        raise line.error("both group_size and quant_groups", "keep one of them: they replace each other")
    return LayerSettings.from_dict(values)


def pinned_settings(profile: Profile, pins: Pins) -> dict[str, LayerSettings]:
    """Return the settings of each pinned layer. Raise PolicyError for a pin that matches no layer."""
    names = [layer.name for layer in profile.layers]
    pinned: dict[str, LayerSettings] = {}
    for glob, settings in pins.items():
        matches = [name for name in names if fnmatchcase(name, glob)]
        if not matches:
            raise PolicyError(f"pin {glob!r}: no layer has this name{_near(glob, names)}")
        pinned.update(dict.fromkeys(matches, settings))
    return pinned


def _near(word: str, names: Collection[str]) -> str:
    near = get_close_matches(word, list(names), 1)
    return f"\nthe nearest is {near[0]!r}" if near else "\n`mesa-tune profile --json` lists the layers"
