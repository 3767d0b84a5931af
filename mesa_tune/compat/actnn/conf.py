"""ActNN's configuration. Layers read it when they are made; later changes are for later layers."""

from dataclasses import dataclass, field, fields
from typing import Any, Final


@dataclass
class QuantizationConfig:
    """ActNN's fields and defaults, which are its level L3.

    `activation_compression_bits`: average bits an element of layers of group 0, 1, 2 (a layer's `group`).
    `adaptive_conv_scheme`, `adaptive_bn_scheme`: each sample its own bits; `perlayer`: each layer, too.
    `pergroup`: a range for every `group_size` elements, else one a tensor. `use_gradient`: samples are
    weighted by their gradients, which needs `QScheme.num_samples` and `QScheme.batch`.
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
    debug_memory_model: bool = False
    debug_speed: bool = False
    debug_memory_op_forward: bool = False
    debug_memory_op_backward: bool = False
    debug_remove_bn: bool = False
    debug_remove_relu: bool = False

    def bits(self, group: int) -> int:
        """Average bits of layers of `group`; a list that is too short goes on as it ends."""
        given = self.activation_compression_bits
        bits = given[min(group, len(given) - 1)]
        if not 1 <= bits <= 8:
            raise ValueError(f"activation_compression_bits must be from 1 to 8, but got {given}")
        return bits

    def without_meaning(self) -> list[str]:
        """Fields that were changed although they mean nothing here."""
        plain = QuantizationConfig()
        return [name for name in _WITHOUT_MEANING if getattr(self, name) != getattr(plain, name)]


config = QuantizationConfig()

_WITHOUT_MEANING: Final = (
    "simulate",
    *(entry.name for entry in fields(QuantizationConfig) if entry.name.startswith("debug_")),
)
_FIXED: Final[dict[str, Any]] = {
    "activation_compression_bits": [4],
    "adaptive_conv_scheme": False,
    "adaptive_bn_scheme": False,
}
LEVELS: Final[dict[str, dict[str, Any]]] = {
    "L0": {"compress_activation": False, "adaptive_conv_scheme": False, "adaptive_bn_scheme": False},
    "L1": {**_FIXED, "enable_quantized_bn": False},
    "L2": _FIXED,
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


def set_optimization_level(level: str) -> None:
    """Sets what `level` decides; what no level decides stays.

    `L0` nothing is compressed; `L1` 4 bits, batch norms exact; `L2` 4 bits; `L3` 2 bits, adaptive; `L3.1` the
    same (its cache settings are for ActNN's kernels); `L4`, `L5` 2 bits and swapping; `swap` swapping alone.
    Raises ValueError for another.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, but got {level!r}")
    plain = QuantizationConfig()
    for name in {name for keys in LEVELS.values() for name in keys}:
        setattr(config, name, LEVELS[level].get(name, getattr(plain, name)))
