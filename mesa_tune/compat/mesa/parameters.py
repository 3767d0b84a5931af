"""Rules of a Mesa policy as `read_policy` returns them: which layers they match, and their values parsed."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from mesa_tune.errors import PolicyError
from mesa_tune.policy.parser import MESA_KEYS
from mesa_tune.policy.rules import suggestion
from mesa_tune.policy.settings import KEYS, check_value
from mesa_tune.policy.values import CONDITIONS, split_words

TENSORS: Final = ("clip_val", "shift", "iteration")
_CONDITION_KEYS: Final = (*CONDITIONS, "trigger", "section", "index", "tag")


def matches(parameters: Mapping[str, Any], tag: str, index: int) -> bool:
    """Return whether the rule `parameters` applies to the layer `index` of `tag`."""
    indices = _words(parameters["by_index"])
    tags = _words(parameters.get("by_tag", tag))
    base = tag.partition("-")[0]
    wanted = str(parameters.get("section") or base)
    is_tag = (tag in tags or base in tags) and wanted in (tag, base)
    return is_tag and (indices == ["all"] or str(index) in indices)


def parse_settings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a rule, with text parsed into values.

    Raises:
        PolicyError: an unknown key or a bad value.
    """
    settings = {}
    for key, value in parameters.items():
        if key in _CONDITION_KEYS:
            continue
        if key not in KEYS and key not in MESA_KEYS:
            raise PolicyError(f"unknown key {key!r}\n{suggestion(key, KEYS, 'keys are')}")
        if key in KEYS or key in TENSORS:
            settings[key] = _value(key, value)
    return settings


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return split_words(value)
    return [str(word) for word in value] if isinstance(value, (list, tuple)) else [str(value)]


def _value(key: str, value: Any) -> Any:
    try:
        parsed = _PARSERS.get(key, str)(value) if isinstance(value, str) else value
        if key in KEYS:
            check_value(key, parsed)
    except ValueError as error:
        raise PolicyError(f"bad value {value!r} for {key}\n{error}") from None
    return parsed


def _bool(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise ValueError(f"{word!r} is neither True nor False")
    return word.lower() == "true"


_PARSERS: Final[dict[str, Callable[[str], Any]]] = {
    "enable": _bool,
    "level": int,
    "group_size": int,
    "quant_groups": int,
    "ema_decay": float,
    "drop": float,
    **dict.fromkeys(TENSORS, float),
}
