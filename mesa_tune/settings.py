"""`LayerSettings`: how one layer stores what it keeps for backward; and the tags that layers go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

# In the order in which a written policy has its sections: Mesa's tags, then ours.
MESA_TAGS: Final = ("fc", "conv", "bn", "layernorm", "gelu", "relu", "softmax", "matmul")
TAGS: Final = (*MESA_TAGS, "attention", "silu", "rmsnorm", "dropout", "maxpool", "mul", "loss", "other")

ROUNDINGS: Final = ("stochastic", "nearest")
STORES: Final = ("quantize", "exact", "derive", "recompute", "offload")


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """Settings of one layer, complete and valid; the keys are those of policy.txt.

    `level` is a number of quantization levels (2 to 256). Exactly one of `group_size` (contiguous elements a
    group) and `quant_groups` (groups along channels or heads, over the whole batch) is set; the other is None.
    `drop` is the fraction of smallest-magnitude elements not stored. Raises ValueError for a value outside its
    range.
    """

    enable: bool = True
    level: int = 256
    group_size: int | None = 256
    quant_groups: int | None = None
    ema_decay: float = 0.0
    rounding: str = "stochastic"
    drop: float = 0.0
    store: str = "quantize"

    def __post_init__(self) -> None:
        if not isinstance(self.enable, bool):
            raise ValueError(f"enable must be True or False, but got {self.enable!r}")
        _require_integer("level", self.level, 2, 256)
        if (self.group_size is None) == (self.quant_groups is None):
            raise ValueError(
                "exactly one of group_size and quant_groups must be set, "
                f"but got (group_size={self.group_size}, quant_groups={self.quant_groups})"
            )
        if self.group_size is not None:
            _require_integer("group_size", self.group_size, 1)
        if self.quant_groups is not None:
            _require_integer("quant_groups", self.quant_groups, 1)
        _require_fraction("ema_decay", self.ema_decay)
        _require_fraction("drop", self.drop)
        _require_word("rounding", self.rounding, ROUNDINGS)
        _require_word("store", self.store, STORES)

    @property
    def bits(self) -> int:
        """Bits that store one element: ceil(log2(level)), 1 to 8."""
        return (self.level - 1).bit_length()

    @property
    def exact(self) -> bool:
        """True if the layer keeps what PyTorch keeps."""
        return not self.enable or self.store == "exact"

    @property
    def label(self) -> str:
        """Short text for tables: `4 bits / 256`, `10 levels / 64`, `8 bits / 3 groups`, `exact`."""
        if self.exact:
            return "exact"
        width = f"{self.bits} bit{'s' if self.bits > 1 else ''}"
        parts = [width if self.level == 1 << self.bits else f"{self.level} levels", "/"]
        parts += [str(self.group_size)] if self.quant_groups is None else [f"{self.quant_groups} groups"]
        parts += [self.rounding] if self.rounding != "stochastic" else []
        parts += [f"drop {self.drop:g}"] if self.drop else []
        parts += [self.store] if self.store != "quantize" else []
        return " ".join(parts)

    def to_dict(self) -> dict[str, bool | int | float | str]:
        """Plain values for JSON: `enable`, `level` and the grouping always, the rest where not the default."""
        always = ("enable", "level", "quant_groups" if self.group_size is None else "group_size")
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in always or getattr(self, field.name) not in (field.default, None)
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> LayerSettings:
        """The settings that `to_dict` made `values` of. Raises ValueError for an unknown key or bad value."""
        known = {field.name for field in fields(LayerSettings)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        given = dict(values)
        if "quant_groups" in given:
            given.setdefault("group_size", None)
        return LayerSettings(**given)


def _require_integer(key: str, value: Any, low: int, high: int | None = None) -> None:
    # bool is an int to Python, but `level: True` is a mistake.
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        wanted = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise ValueError(f"{key} must be an integer {wanted}, but got {value!r}")


def _require_fraction(key: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{key} must be at least 0 and below 1, but got {value!r}")


def _require_word(key: str, value: Any, words: tuple[str, ...]) -> None:
    if value not in words:
        raise ValueError(f"{key} must be one of {', '.join(words)}, but got {value!r}")


EXACT: Final = LayerSettings(enable=False)
