"""Values of policy.txt: text into numbers and words, each mistake with the line it stands in."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from mesa_tune.policy.rules import Indices, Place, nearest
from mesa_tune.policy.settings import ALLOCATIONS, ROUNDINGS, STORES, Value, check_value

CONDITIONS: Final = ("by_index", "by_name", "by_tag")

# What each key takes, as messages say it.
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
    "rounding": f"one of {', '.join(ROUNDINGS)}",
    "allocation": f"one of {', '.join(ALLOCATIONS)}",
}


def words_for(key: str) -> str:
    """What `key` takes, in words."""
    return _WORDS[key] if key in _WORDS else f"one of {', '.join(_choices(key))}"


def _choices(key: str) -> tuple[str, ...]:
    return tuple(STORES) if key == "store" else _CHOICES.get(key, ())


_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}")


def words_of(value: str) -> list[str]:
    """The items of a list whose separators are spaces, tabs or commas."""
    return value.replace(",", " ").split()


def read_indices(place: Place, words: list[str]) -> Indices:
    """`all`, or the indices in `words`. Raises PolicyError for anything else."""
    if words == ["all"]:
        return "all"
    if "all" in words:
        raise place.refuse("`all` beside indices", "write `all` or the indices, not both")
    for word in words:
        if not _INTEGER.fullmatch(word):
            near = " (did you mean 'all'?)" if nearest(word, ["all"]) else ""
            raise place.refuse(f"{word!r} is no index", f"write {words_for('by_index')}{near}")
        if int(word) < 0:
            raise place.refuse(f"index {word} is below 0", "indices count the layers of a tag from 0")
    return tuple(int(word) for word in words)


def read_value(place: Place, key: str, words: list[str]) -> Value:
    """The value of `key` from its `words`. Raises PolicyError if it is missing, not one, or not allowed."""
    if len(words) != 1:
        what = f"{key} without a value" if not words else f"{len(words)} values for {key}"
        raise place.refuse(what, f"{key} takes {words_for(key)}")
    try:
        value = _READERS[key](words[0])
        check_value(key, value)
    except ValueError:
        near = nearest(words[0], _choices(key))
        remedy = f"{key} takes {words_for(key)}" + (f"; did you mean {near!r}?" if near else "")
        raise place.refuse(f"bad value {words[0]!r} for {key}", remedy) from None
    return value


def _read_bool(word: str) -> bool:
    # Mesa's own spellings; it takes every other word, `FALSE` and `0` too, for True.
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
    "rounding": str,
    "allocation": str,
    "store": str,
}
