"""The codecs, the ways to store a tensor: one file per codec, and the table `CODECS`.

To add a codec, add its file, its line in `CODECS`, and its word in `STORES` of `mesa_tune.policy.settings`,
by which policies choose it.
"""

from collections.abc import Sequence

from mesa_tune.codecs import drop, levels, mixed, offload, quantize, rows, running, vrandom
from mesa_tune.codecs.spec import STATEFUL, Codebook, Codec, Memory, Spec, codec_of, fitting_size

CODECS: dict[str, Codec] = {
    "quantize": quantize,
    "running": running,
    "drop": drop,
    "rows": rows,
    "levels": levels,
    "mixed": mixed,
    "offload": offload,
    "vrandom": vrandom,
}

__all__ = [
    "CODECS",
    "STATEFUL",
    "Codebook",
    "Codec",
    "Memory",
    "Spec",
    "codec_of",
    "fitting_size",
    "memory_bytes",
]


def memory_bytes(shape: Sequence[int], spec: Spec) -> int:
    """Return the bytes of the memory that the codec of `spec` needs from step to step for one tensor."""
    size = getattr(CODECS[spec.codec], "memory_bytes", None)
    return 0 if size is None else int(size(shape, spec))
