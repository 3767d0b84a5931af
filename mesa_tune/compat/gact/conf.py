"""GACT's configuration. A `Controller` reads it when it is made; later changes are for later controllers."""

from dataclasses import dataclass, fields
from typing import Any, Final

from mesa_tune.notice import warn_once


@dataclass
class QuantizationConfig:
    """GACT's fields and defaults.

    `bit`: bits an element, on average where `auto_prec` places them; `max_bit` bounds those of one tensor
    (8 at most here). `adapt_interval`: iterations between two adaptations.
    """

    compress_activation: bool = True
    bit: int = 4
    group_size: int = 256
    check_dup: bool = False
    auto_prec: bool = True
    max_bit: int = 32
    adapt_interval: int = 1000
    work_dir: str = "./log/"
    log_interval: int = -1
    debug: bool = False
    swap: bool = False
    prefetch: bool = False


class _Config(QuantizationConfig):
    """What `config` is: an assignment warns where it comes too late, or has no meaning."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name not in _NAMES:
            warn_once(f"mesa-tune: gact.config.{name} means nothing here: GACT has no such field.")
        elif _made:
            warn_once("mesa-tune: gact.config counts for controllers that are made from now on.")

    def copy(self) -> QuantizationConfig:
        """The configuration for a controller that is being made."""
        _made[:] = [True]
        return QuantizationConfig(**{name: getattr(self, name) for name in _NAMES})


_DEFAULTS: Final = QuantizationConfig()
_NAMES: Final = tuple(field.name for field in fields(QuantizationConfig))
_made: list[bool] = []
config = _Config()
# What a level decides, and how each differs from the defaults (4 bits, adapted).
_DECIDED: Final = ("compress_activation", "bit", "auto_prec", "swap", "prefetch")
LEVELS: Final[dict[str, dict[str, Any]]] = {
    "L0": {"compress_activation": False},
    "L1": {"auto_prec": False},
    "L1.1": {"auto_prec": False, "bit": 8},
    "L1.2": {"auto_prec": False, "bit": 2},
    "L2": {},
    "L2.1": {"bit": 3},
    "L2.2": {"bit": 2},
    "L3": {"swap": True, "prefetch": True},
    "swap": {"compress_activation": False, "swap": True},
    "L4bit-swap": {"auto_prec": False, "swap": True, "prefetch": True},
}


def set_optimization_level(level: str) -> None:
    """Sets what `level` decides.

    `L0` nothing; `L1 L1.1 L1.2` 4, 8, 2 bits; `L2 L2.1 L2.2` 4, 3, 2 bits on average; `L3` and `L4bit-swap`
    4 bits and swapping; `swap` swapping alone. Raises ValueError for another.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, but got {level!r}")
    for name in _DECIDED:
        object.__setattr__(config, name, LEVELS[level].get(name, getattr(_DEFAULTS, name)))


def set_adapt_interval(i: int) -> None:
    """An adaptation every `i` iterations."""
    config.adapt_interval = i


def unknown_changes(used: QuantizationConfig) -> list[str]:
    """Fields of `used` that are not the default and mean nothing here."""
    without_meaning = ("check_dup", "work_dir", "log_interval", "debug")
    return [
        field.name
        for field in fields(used)
        if field.name in without_meaning and getattr(used, field.name) != getattr(_DEFAULTS, field.name)
    ]
