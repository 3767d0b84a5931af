"""Parser of the values in policy.txt: numbers, words and lists. Every error names its line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from mesa_tune.policy.rules import Indices, SourceLine, nearest
from mesa_tune.policy.settings import ALLOCATIONS, ROUNDINGS, STORES, Value, check_value

CONDITIONS: Final = ("by_index", "by_name", "by_tag")

# The allowed values of each key, as messages print them.
_WORDS: Final = {
    "by_index": "`all` or indices such as 0 3 5",
    "by_name": "layer names or globs such as blocks.*.mlp.fc1",
    "by_tag": "tags such as fc",
    "enable": "True or False",
    "level": "a whole number from 2 to 256",
    "group_size": "a whole number of elements, 1 or more",
    "quant_groups": "a whole number of groups, 1 or more",
    "ema_decay": "a number from 0 to below 1",
    "drop": "a fraction from 0 to below 1",
    "rows": "a fraction above 0, 1 at most",
    "rounding": f"one of {', '.join(ROUNDINGS)}",
    "allocation": f"one of {', '.join(ALLOCATIONS)}",
    "tile": "a whole number of slices, 1 or more",
}


def allowed_values(key: str) -> str:
    """Return the allowed values of `key`, in words."""
    return _WORDS[key] if key in _WORDS else f"one of {', '.join(_choices(key))}"


def _choices(key: str) -> tuple[str, ...]:
    return tuple(STORES) if key == "store" else _CHOICES.get(key, ())


_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}")


def split_words(value: str) -> list[str]:
    """Split a list at spaces, tabs and commas."""
    return value.replace(",", " ").split()


def read_indices(line: SourceLine, words: list[str]) -> Indices:
    """Return `all`, or the indices in `words`. Raise PolicyError for anything else."""
    if words == ["all"]:
        return "all"
    if "all" in words:
        raise line.error("`all` beside indices", "write `all` or the indices, not both")
    for word in words:
        if not _INTEGER.fullmatch(word):
            near = " (did you mean 'all'?)" if nearest(word, ["all"]) else ""
            raise line.error(f"{word!r} is no index", f"write {allowed_values('by_index')}{near}")
        if int(word) < 0:
            raise line.error(f"index {word} is below 0", "indices count the layers of a tag from 0")
    return tuple(int(word) for word in words)


def read_value(line: SourceLine, key: str, words: list[str]) -> Value:
    """Parse the value of `key`. Raise PolicyError unless `words` is a single allowed value."""
    if len(words) != 1:
        what = f"{key} without a value" if not words else f"{len(words)} values for {key}"
        raise line.error(what, f"{key} takes {allowed_values(key)}")
    try:
        value = _READERS[key](words[0])
        check_value(key, value)
    except ValueError:
        near = nearest(words[0], _choices(key))
        remedy = f"{key} takes {allowed_values(key)}" + (f"; did you mean {near!r}?" if near else "")
        raise line.error(f"bad value {words[0]!r} for {key}", remedy) from None
    return value


def _read_bool(word: str) -> bool:
    # Mesa reads every other word, even `FALSE` and `0`, as True.
    if word not in {"True", "true", "False", "false"}:
        raise ValueError(word)
    return word in {"True", "true"}


def _read_integer(word: str) -> int:
    if not _INTEGER.fullmatch(word):
        raise ValueError(word)
    return int(word)


_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "enable": ("True", "False"),
    "rounding": ROUNDINGS,
    "allocation": ALLOCATIONS,
}
_READERS: Final[dict[str, Callable[[str], Value]]] = {
    "enable": _read_bool,
    "level": _read_integer,
    "group_size": _read_integer,
    "quant_groups": _read_integer,
    "ema_decay": float,
    "drop": float,
    "rows": float,
    "rounding": str,
    "allocation": str,
    "store": str,
    "tile": _read_integer,
}
