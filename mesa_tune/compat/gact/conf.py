"""GACT's configuration. A `Controller` copies it when it is created; changes apply to later controllers."""

from dataclasses import dataclass, fields
from typing import Any, Final

from mesa_tune.notice import warn_once


@dataclass
class QuantizationConfig:
    """GACT's fields and defaults.

    `bit`: bits per element, the average over layers if `auto_prec` allocates them. `max_bit`: the most bits
    of one tensor (8 here, if larger). `adapt_interval`: iterations between two adaptations.
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


class _GACTConfig(QuantizationConfig):
    """Class of `config`: an assignment warns if it comes too late, or if the field means nothing."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name not in _NAMES:
            warn_once(f"mesa-tune: gact.config.{name} means nothing here: GACT has no such field.")
        elif _controller_created:
            warn_once("mesa-tune: gact.config applies only to controllers created from now on.")

    def copy(self) -> QuantizationConfig:
        """Return a copy for a controller that is being created."""
        _controller_created[:] = [True]
        return QuantizationConfig(**{name: getattr(self, name) for name in _NAMES})


_DEFAULTS: Final = QuantizationConfig()
_NAMES: Final = tuple(field.name for field in fields(QuantizationConfig))
_controller_created: list[bool] = []
config = _GACTConfig()
# The fields that a level decides, and the values that differ from the defaults (4 bits, adapted).
_LEVEL_FIELDS: Final = ("compress_activation", "bit", "auto_prec", "swap", "prefetch")
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
    """Set the fields that `level` decides.

    `L0`: nothing is compressed. `L1`, `L1.1`, `L1.2`: 4, 8, 2 bits. `L2`, `L2.1`, `L2.2`: 4, 3, 2 bits on
    average. `L3`, `L4bit-swap`: 4 bits, and swapping. `swap`: only swapping.

    Raises:
        ValueError: another level.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, but got {level!r}")
    for name in _LEVEL_FIELDS:
        object.__setattr__(config, name, LEVELS[level].get(name, getattr(_DEFAULTS, name)))


def set_adapt_interval(i: int) -> None:
    """Adapt every `i` iterations."""
    config.adapt_interval = i


def changes_without_effect(used: QuantizationConfig) -> list[str]:
    """Return the fields of `used` that differ from the default and mean nothing here."""
    without_meaning = ("check_dup", "work_dir", "log_interval", "debug")
    return [
        field.name
        for field in fields(used)
        if field.name in without_meaning and getattr(used, field.name) != getattr(_DEFAULTS, field.name)
    ]
