"""The codecs, the ways to store a tensor: one file per codec, and the table `CODECS`.

To add a codec, add its file, its line in `CODECS`, and its word in `STORES` of `mesa_tune.policy.settings`,
by which policies choose it.
"""

from collections.abc import Sequence

from torch import Tensor

from mesa_tune import ops
from mesa_tune.codecs import drop, mixed, offload, quantize, running, vrandom
from mesa_tune.codecs.spec import Codec, Memory, Spec, fitting_size

CODECS: dict[str, Codec] = {
    "quantize": quantize,
    "running": running,
    "drop": drop,
    "mixed": mixed,
    "offload": offload,
    "vrandom": vrandom,
}

__all__ = ["CODECS", "Codec", "Memory", "Spec", "fitting_size", "memory_bytes", "refusal"]


def refusal(tensor: Tensor, spec: Spec) -> str | None:
    """Return why `tensor` cannot be stored by `spec`; None if it can.

    A codec whose limits differ from the quantizer's has a function `refuses(tensor, spec)` of its own.
    """
    refuses = getattr(CODECS[spec.codec], "refuses", None)
    if refuses is not None:
        return str(reason) if (reason := refuses(tensor, spec)) else None
    if tensor.dtype not in ops.DTYPES:
        return f"its dtype is {tensor.dtype}"
    if spec.quant_groups:
        extent = (tensor.shape or (1,))[1 if tensor.dim() in (4, 5) else -1]
        if extent % spec.quant_groups:
            return f"quant_groups {spec.quant_groups} does not divide {extent}"
    return None


def memory_bytes(shape: Sequence[int], spec: Spec) -> int:
    """Return the bytes of the memory that the codec of `spec` needs from step to step for one tensor."""
    size = getattr(CODECS[spec.codec], "memory_bytes", None)
    return 0 if size is None else int(size(shape, spec))
