"""ActNN's configuration, `config`.

A layer copies the configuration when it is created, so two models of one process may have different levels. A
field that is assigned later (`config.compress_activation = False`) applies to all existing layers, as in
ActNN. What is hard is to do both: assignments are numbered, and a copy takes over those that it has not seen.
"""

import ast
import os
from dataclasses import dataclass, field, fields
from typing import Any, Final

from mesa_tune.notice import warn_once


@dataclass
class QuantizationConfig:
    """ActNN's fields and defaults, which are its level L3.

    `activation_compression_bits`: average bits per element of layers of group 0, 1, 2 (a layer's `group`).
    With more than 8 bits a tensor is stored as PyTorch stores it.
    `adaptive_conv_scheme`, `adaptive_bn_scheme`: each sample has its own bits; `perlayer`: each layer, too.
    `pergroup`: one range per `group_size` elements, else one per tensor. `use_gradient`: weight samples by
    their gradients, which needs `QScheme.num_samples` and `QScheme.batch`. `debug_memory_model` and
    `debug_speed` (environment: `DEBUG_MEM`, `DEBUG_SPEED`), `debug_remove_bn` and `debug_remove_relu` are
    only read by ActNN's programs and models.
    """

    compress_activation: bool = True
    activation_compression_bits: list[int] = field(default_factory=lambda: [2, 8, 8])
    pergroup: bool = True
    perlayer: bool = True
    initial_bits: int = 8
    stochastic: bool = True
    training: bool = True
    group_size: int = 256
    use_gradient: bool = False
    adaptive_conv_scheme: bool = True
    adaptive_bn_scheme: bool = True
    simulate: bool = False
    enable_quantized_bn: bool = True
    empty_cache_threshold: float | None = None
    pipeline_threshold: int | None = None
    cudnn_benchmark_conv2d: bool = True
    swap: bool = False
    debug_memory_model: bool = field(default_factory=lambda: _switch("DEBUG_MEM"))
    debug_speed: bool = field(default_factory=lambda: _switch("DEBUG_SPEED"))
    debug_memory_op_forward: bool = False
    debug_memory_op_backward: bool = False
    debug_remove_bn: bool = False
    debug_remove_relu: bool = False

    def __post_init__(self) -> None:
        self._seen = _assigned.count

    def bits(self, group: int) -> int:
        """Return the average bits of layers of `group`; the last element stands for all later groups."""
        bits_by_group = self.activation_compression_bits
        bits = bits_by_group[min(group, len(bits_by_group) - 1)]
        if bits < 1:
            raise ValueError(f"activation_compression_bits must be at least 1, but got {bits_by_group}")
        if bits > MAX_BITS:
            warn_once(f"mesa-tune: actnn: {bits} bits per element are stored as PyTorch stores them.")
        return bits

    def now(self) -> "QuantizationConfig":
        """Take over what was assigned to `config` since the last call; return this configuration."""
        config.record_changed_list()
        if self._seen != _assigned.count:
            for name, (number, value) in _assigned.values.items():
                if number > self._seen:
                    setattr(self, name, value)
            self._seen = _assigned.count
        return self


class _Assigned:
    """Values assigned to fields of `config`, each with the number of the assignment."""

    def __init__(self) -> None:
        self.count = 0
        self.values: dict[str, tuple[int, Any]] = {}

    def record(self, name: str, value: Any) -> None:
        self.count += 1
        self.values[name] = (self.count, value)


_assigned = _Assigned()


class _ActNNConfig(QuantizationConfig):
    """Class of `config`: an assignment applies to existing layers, and warns if the field has no effect."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.startswith("_"):
            return
        if name not in _DEFAULTS:
            warn_once(f"mesa-tune: actnn.config.{name} means nothing here: ActNN has no such field.")
        elif name in _WITHOUT_EFFECT and value != _DEFAULTS[name]:
            warn_once(f"mesa-tune: actnn.config.{name} means nothing here.")
        self._record(name, value)

    def _record(self, name: str, value: Any) -> None:
        if name == "activation_compression_bits":
            self._bits = value = _listed(value)
        _assigned.record(name, value)

    def record_changed_list(self) -> None:
        """Record a changed element of the list of bits, which `__setattr__` does not see."""
        if _listed(self.activation_compression_bits) != self._bits:
            self._record("activation_compression_bits", self.activation_compression_bits)

    def set_by_level(self, name: str, value: Any) -> None:
        """Set a field for layers created from now on."""
        if name == "activation_compression_bits":
            value = self._bits = _listed(value)
            value = list(value)
        object.__setattr__(self, name, value)

    def copy(self) -> QuantizationConfig:
        """Return a copy for a layer that is being created."""
        values = {name: getattr(self, name) for name in _DEFAULTS}
        values["activation_compression_bits"] = _listed(self.activation_compression_bits)
        return QuantizationConfig(**values)


def _listed(bits: Any) -> list[int]:
    """Return the bits as a list by group; ActNN's programs also write one number for all groups."""
    return list(bits) if isinstance(bits, (list, tuple)) else [bits]


def _switch(variable: str) -> bool:
    """Return an environment variable of ActNN's programs as bool: `True`, `False` or a number."""
    return bool(ast.literal_eval(os.environ.get(variable, "False")))


MAX_BITS: Final = 8
_WITHOUT_EFFECT: Final = (
    "simulate",
    "initial_bits",
    "empty_cache_threshold",
    "pipeline_threshold",
    "cudnn_benchmark_conv2d",
    "debug_memory_op_forward",
    "debug_memory_op_backward",
)
_FIXED_4_BITS: Final[dict[str, Any]] = {
    "activation_compression_bits": [4],
    "adaptive_conv_scheme": False,
    "adaptive_bn_scheme": False,
}
LEVELS: Final[dict[str, dict[str, Any]]] = {
    "L0": {"compress_activation": False, "adaptive_conv_scheme": False, "adaptive_bn_scheme": False},
    "L1": {**_FIXED_4_BITS, "enable_quantized_bn": False},
    "L2": _FIXED_4_BITS,
    "L3": {},
    "L3.1": {
        "cudnn_benchmark_conv2d": False,
        "empty_cache_threshold": 0.2,
        "pipeline_threshold": 3 * 1024**3,
    },
    "L4": {"swap": True},
    "L5": {"swap": True},
    "swap": {"swap": True, "compress_activation": False},
}


_plain = QuantizationConfig()
_DEFAULTS: Final = {entry.name: getattr(_plain, entry.name) for entry in fields(_plain)}
config = _ActNNConfig()
_layer_created: list[bool] = []


def for_new_layer() -> QuantizationConfig:
    """Return the configuration of a layer that is being created."""
    _layer_created[:] = [True]
    return config.copy()


def set_optimization_level(level: str) -> None:
    """Set the fields that levels decide, for layers created from now on; other fields stay.

    `L0`: nothing is compressed. `L1`: 4 bits, batch norms exact. `L2`: 4 bits. `L3`: 2 bits, adaptive.
    `L3.1`: the same, since its cache settings are for ActNN's kernels. `L4`, `L5`: 2 bits, and swapping.
    `swap`: only swapping.

    Raises:
        ValueError: another level.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, but got {level!r}")
    if _layer_created:
        warn_once(
            "mesa-tune: actnn: existing layers do not take over the new level: call set_optimization_level "
            "before layers are created, or assign fields of actnn.config, which apply to all layers."
        )
    for name in {name for keys in LEVELS.values() for name in keys}:
        config.set_by_level(name, LEVELS[level].get(name, _DEFAULTS[name]))
