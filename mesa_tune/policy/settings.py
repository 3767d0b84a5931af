"""`LayerSettings`: how one layer stores what it saves for backward. Also the list of tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final

# In the order of the sections in a written policy: Mesa's tags, then ours.
MESA_TAGS: Final = ("fc", "conv", "bn", "layernorm", "gelu", "relu", "softmax", "matmul")
_MODULE_TAGS = ("attention", "silu", "rmsnorm", "groupnorm", "instancenorm", "dropout", "maxpool", "avgpool")
_FUNCTION_TAGS = ("pad", "mul", "pointwise", "reduction", "loss", "other")
TAGS: Final = (*MESA_TAGS, *_MODULE_TAGS, *_FUNCTION_TAGS)

ROUNDINGS: Final = ("stochastic", "nearest")
ALLOCATIONS: Final = ("uniform", "sample")
STORES = ["quantize", "exact", "derive", "recompute", "offload", "levels"]
"""Values of `store`. The codecs that a policy chooses by name add theirs to this list."""

MIN_ELEMENTS: Final = 4096
"""Tensors of at most 4096 elements stay exact: compressing them saves little and errs most."""
MOST_FIXED_LEVELS: Final = 16
"""Most levels of `store: levels`: 4 bits per element."""
HOOKED_LEVELS: Final = 256
"""Hooks have no formula to apply Rule 7, so they always store 8 bits per element."""

Value = bool | int | float | str


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """Settings of one layer, complete and valid; the keys are those of policy.txt.

    `level` is the number of quantization levels (2 to 256). Exactly one of `group_size` (contiguous elements
    per group) and `quant_groups` (groups along channels or heads, over the whole batch) is set; the other is
    None. `drop` is the fraction of smallest-magnitude elements that are not stored; the others are quantized,
    or stored exactly with `store` exact. `rows` is the fraction of rows that are stored, chosen at random,
    where the backward is linear in the saved tensor; these, too, are quantized or stored
    exactly. With `allocation` sample each sample has its own number of bits per element, `bits` on average.
    `tile` is the number of slices in which a loss goes backward together with the layer that made its
    logits, and then stores nothing lossy, or in which a whole module runs. With `store` levels an
    activation's derivative is one of `level` (2 to 16) fixed values. Raise ValueError for a value outside its
    range, and for `rows` beside a setting that it does not go with.
    """

    enable: bool = True
    level: int = 256
    group_size: int | None = 256
    quant_groups: int | None = None
    ema_decay: float = 0.0
    rounding: str = "stochastic"
    drop: float = 0.0
    rows: float = 1.0
    allocation: str = "uniform"
    store: str = "quantize"
    tile: int = 1

    def __post_init__(self) -> None:
        if (self.group_size is None) == (self.quant_groups is None):
            raise ValueError(
                "exactly one of group_size and quant_groups must be set, "
                f"but got (group_size={self.group_size}, quant_groups={self.quant_groups})"
            )
        for key in KEYS:
            value = getattr(self, key)
            if value is not None or key not in ("group_size", "quant_groups"):
                check_value(key, value)
        if self.enable and self.store == "levels" and self.level > MOST_FIXED_LEVELS:
            raise ValueError(
                f"`store: levels` has 2 to {MOST_FIXED_LEVELS} levels, but got level {self.level}"
            )
        if others := beside_rows({key: getattr(self, key) for key in KEYS}):
            raise ValueError(f"`rows` {self.rows:g} does not go with {', '.join(others)}: leave one out")

    @property
    def bits(self) -> int:
        """Bits per element: ceil(log2(level)), 1 to 8."""
        return (self.level - 1).bit_length()

    @property
    def exact(self) -> bool:
        """True if the layer saves exactly what PyTorch saves."""
        return not self.enable or (self.store == "exact" and not self.omits and self.tile == 1)

    @property
    def omits(self) -> bool:
        """True if some elements are not stored at all."""
        return self.drop > 0 or self.rows < 1

    @property
    def of_all_rows(self) -> LayerSettings:
        """These settings for a layer whose function is not linear in what it saves: it stores all rows."""
        return self if self.rows == 1 else replace(self, rows=1.0)

    @property
    def without_levels(self) -> LayerSettings:
        """These settings for a layer that is no activation with fixed levels: it quantizes."""
        return replace(self, store="quantize") if self.store == "levels" else self

    @property
    def hooked(self) -> LayerSettings:
        """These settings for a layer stored by hooks: no formula bounds its error, so 8 bits per element.

        Exact and offloaded layers stay so.
        """
        if self.tile > 1:
            return replace(self, tile=1).hooked
        if self.exact or self.store == "offload":
            return self
        if self.store == "exact":
            return replace(self, drop=0.0, rows=1.0)
        return replace(
            self.without_levels, level=HOOKED_LEVELS, drop=0.0, rows=1.0, ema_decay=0.0, allocation="uniform"
        )

    @property
    def label(self) -> str:
        """Short text for tables: `4 bits / 256`, `10 levels / 64`, `8 bits / 3 groups`, `exact`."""
        if self.exact:
            return "exact"
        if self.tile > 1:
            return f"{replace(self, tile=1).label} tile {self.tile}"
        if self.store == "exact":
            return " ".join(["exact", *self._omitted()])
        if self.store == "offload":
            return "offload"
        if self.store == "levels":
            return f"{self.level} fixed levels"
        width = f"{self.bits} bit{'s' if self.bits > 1 else ''}"
        width = width if self.level == 1 << self.bits else f"{self.level} levels"
        groups = str(self.group_size) if self.quant_groups is None else f"{self.quant_groups} groups"
        return " ".join([width, "/", groups, *self._unusual()])

    def _unusual(self) -> list[str]:
        parts = [self.rounding] if self.rounding != "stochastic" else []
        parts += self._omitted()
        parts += [f"ema {self.ema_decay:g}"] if self.ema_decay else []
        parts += [f"by {self.allocation}"] if self.allocation != "uniform" else []
        return parts + ([self.store] if self.store != "quantize" else [])

    def _omitted(self) -> list[str]:
        parts = [f"drop {self.drop:g}"] if self.drop else []
        return parts + ([f"rows {self.rows:g}"] if self.rows < 1 else [])

    def to_dict(self) -> dict[str, Value]:
        """Return plain values for JSON: level and groups of an enabled layer, and what is not the default."""
        always = ("enable", "level", "group_size", "quant_groups") if self.enable else ()
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
            and (field.name in always or value != field.default)
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> LayerSettings:
        """Return the settings that `to_dict` wrote. Raise ValueError for an unknown key or a bad value."""
        if unknown := sorted(set(values) - set(KEYS)):
            raise ValueError(f"unknown settings {', '.join(unknown)}; known are {', '.join(KEYS)}")
        if values.get("quant_groups") is not None:
            values = {"group_size": None, **values}
        return LayerSettings(**values)


_OFF: Final[dict[str, object]] = {
    "quant_groups": None,
    "ema_decay": 0.0,
    "drop": 0.0,
    "allocation": "uniform",
}
_ROW_STORES: Final = ("quantize", "exact", "derive")


def beside_rows(values: Mapping[str, Any]) -> list[str]:
    """Return those of the settings `values`, as text, that `rows` among them does not go with."""
    if values.get("rows", 1) == 1:
        return []
    odd = [f"{key} {values[key]}" for key in _OFF if values.get(key, _OFF[key]) != _OFF[key]]
    store = values.get("store", "quantize")
    return odd if store in _ROW_STORES else [*odd, f"store {store}"]


KEYS: Final = tuple(field.name for field in fields(LayerSettings))


def check_value(key: str, value: object) -> None:
    """Raise ValueError, with the value and what is allowed, if `key` of KEYS cannot have `value`."""
    _CHECKS[key](key, value)


def _require_bool(key: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be True or False, but got {value!r}")


def _require_integer(key: str, value: object, low: int, high: int) -> None:
    # bool is an int to Python, but `level: True` is a mistake.
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{key} must be an integer from {low} to {high}, but got {value!r}")


def _require_fraction(key: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"{key} must be at least 0 and below 1, but got {value!r}")


def _require_share(key: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
        raise ValueError(f"{key} must be above 0 and at most 1, but got {value!r}")


def _require_word(key: str, value: object, words: Sequence[str]) -> None:
    if value not in words:
        raise ValueError(f"{key} must be one of {', '.join(words)}, but got {value!r}")


# The kernels take counts as 32-bit integers.
_require_count = partial(_require_integer, low=1, high=2**31 - 1)
_CHECKS: Final[dict[str, Callable[[str, object], None]]] = {
    "enable": _require_bool,
    "level": partial(_require_integer, low=2, high=256),
    "group_size": _require_count,
    "quant_groups": _require_count,
    "ema_decay": _require_fraction,
    "rounding": partial(_require_word, words=ROUNDINGS),
    "drop": _require_fraction,
    "rows": _require_share,
    "allocation": partial(_require_word, words=ALLOCATIONS),
    "store": lambda key, value: _require_word(key, value, STORES),
    "tile": _require_count,
}

EXACT: Final = LayerSettings(enable=False)
