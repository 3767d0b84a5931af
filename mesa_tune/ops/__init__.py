"""The only interface to the native kernels: schemas, fake kernels, and the reference as default kernel.

Importing this module defines the functional ops `torch.ops.mesa_tune.{quantize, dequantize, pack_bits,
unpack_bits, pack_zero_rows}`, `quantize_ends`, which stores the ranges of 16-bit tensors in 16 bits,
`quantize_rows`, which packs rows of zeros besides, and two that write into existing memory, `quantize_out`
and `dequantize_out`. Their default kernels are those of
`mesa_tune.ops.reference`. The native library, `LIBRARY`, adds kernels for the CPU and, if built with nvcc,
for CUDA. Callers need not ask which kernel runs: all give the same bytes.
`MESA_TUNE_REFERENCE=1` leaves the library out.

What is hard is randomness. The ops are pure: the seed is an argument, and equal arguments give equal results,
so a compiler may merge equal calls. Only `fresh_seed`, by which compiled code gets a new seed, is not pure.
"""

import itertools
import math
import operator
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesa_tune.ops import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LIBRARY = Path(__file__).parents[1] / "_C.abi3.so"
NOISE_STEP = 0x9E3779B97F4A7C15 - 2**64
"""Step between keys of rounding noise: 2⁶⁴ / golden ratio, as int64; no key repeats within 2⁶⁴ steps."""

_SIZES = "int bits, int levels, int group_size, int quant_groups"
_ROWS = "int bits, int levels, int group_size"
_LIKE = "SymInt[] shape, ScalarType dtype"
_NOISE = "bool stochastic, Tensor? seed"
_SCHEMAS = (
    f"quantize(Tensor x, {_SIZES}, {_NOISE}) -> (Tensor data, Tensor ranges)",
    f"quantize_ends(Tensor x, {_SIZES}, {_NOISE}) -> (Tensor data, Tensor ends)",
    f"quantize_rows(Tensor x, {_ROWS}, {_NOISE}) -> (Tensor data, Tensor ranges, Tensor zero_rows)",
    f"quantize_out(Tensor x, {_SIZES}, {_NOISE}, Tensor(a!) data, Tensor(b!) ranges) -> ()",
    f"dequantize(Tensor data, Tensor ranges, {_LIKE}, {_SIZES}, Tensor? zero_rows=None) -> Tensor",
    f"dequantize_out(Tensor data, Tensor ranges, {_SIZES}, Tensor(a!) out) -> ()",
    "pack_bits(Tensor mask) -> Tensor",
    "unpack_bits(Tensor data, SymInt[] shape) -> Tensor",
    "pack_zero_rows(Tensor x) -> Tensor",
    "fresh_seed(Tensor like) -> Tensor",
)


Kernels = dict[str, tuple[Callable[..., object], Callable[..., object]]]


class Quantized(NamedTuple):
    """Result of `quantize` and argument of `dequantize`.

    `data`: uint8 bit planes of the codes. `ranges`: float32 `[groups, 2]`, the value of code 0 and the step
    between codes.
    """

    data: Tensor
    ranges: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int
    levels: int
    group_size: int
    quant_groups: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of `data` and `ranges` together."""
        return self.data.nbytes + self.ranges.nbytes


def quantize(
    x: Tensor,
    bits: int,
    group_size: int = 256,
    *,
    levels: int | None = None,
    quant_groups: int | None = None,
    stochastic: bool = True,
    seed: int | Tensor | None = None,
    out: Quantized | None = None,
) -> Quantized:
    """Store x in `bits` bits per element and two float32 numbers per group.

    x: float32, float16 or bfloat16, of any shape and strides. bits: 1 to 8. levels: 2 to 2**bits, the
    default. group_size: elements per group, consecutive in row-major order; the last group may be shorter.
    quant_groups: instead, the number of groups along channels or heads (dimension 1 of 4-d and 5-d tensors,
    else the last) over the whole batch. stochastic: unbiased rounding, whose noise depends only on the seed,
    the group's number and stored range, and the element's index in the group; False: to the nearest level.
    seed: an int, or an int64 tensor of one element, which is never read on the host; None: a new seed from
    `torch.initial_seed()` and a private counter, which leaves torch's generators unchanged. out: an earlier
    result of the same geometry, whose memory is reused.

    A group of equal values decodes exactly; the smallest step is 2**-126. NaN and Inf decode to NaN. In a
    group that contains them, the finite elements have their own range and all codes but one; with two levels
    one code is not enough, and the whole group decodes to NaN. Raises TypeError or ValueError for other
    arguments.
    """
    levels = _check(x, bits, levels, group_size, quant_groups)
    shape, groups = tuple(x.shape), quant_groups or 0
    noise_seed = _seed_tensor(seed, x) if stochastic else None
    x = x.detach()
    if out is None:
        data, ranges = torch.ops.mesa_tune.quantize.default(
            x, bits, levels, group_size, groups, stochastic, noise_seed
        )
        return Quantized(data, ranges, shape, x.dtype, bits, levels, group_size, quant_groups)
    result = Quantized(out.data, out.ranges, shape, x.dtype, bits, levels, group_size, quant_groups)
    _check_out(out, result)
    torch.ops.mesa_tune.quantize_out.default(
        x, bits, levels, group_size, groups, stochastic, noise_seed, out.data, out.ranges
    )
    return result


def dequantize(q: Quantized, *, out: Tensor | None = None) -> Tensor:
    """Return the tensor that `q` stores, contiguous, of its shape and dtype; decoded into `out` if given."""
    sizes = (q.bits, q.levels, q.group_size, q.quant_groups or 0)
    if out is None:
        decoded: Tensor = torch.ops.mesa_tune.dequantize.default(q.data, q.ranges, q.shape, q.dtype, *sizes)
        return decoded
    if tuple(out.shape) != q.shape or out.dtype != q.dtype:
        raise ValueError(
            f"`out` must have shape {list(q.shape)} and dtype {q.dtype}, but has {list(out.shape)} and"
            f" {out.dtype}: give a tensor like the one that was quantized, or omit `out`."
        )
    torch.ops.mesa_tune.dequantize_out.default(q.data, q.ranges, *sizes, out)
    return out


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a bool tensor of any shape into ceil(n / 8) bytes (uint8), the first element in the lowest bit."""
    if mask.dtype != torch.bool:
        raise TypeError(
            f"`mask` must be a bool tensor, but has dtype {mask.dtype}: compare it with something."
        )
    packed: Tensor = torch.ops.mesa_tune.pack_bits.default(mask)
    return packed


def unpack_bits(data: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the bool tensor of `shape` that `pack_bits` packed into `data`."""
    mask: Tensor = torch.ops.mesa_tune.unpack_bits.default(data, shape)
    return mask


def packed_bytes(
    shape: int | Sequence[int], bits: int, group_size: int = 256, quant_groups: int | None = None
) -> int:
    """Return the bytes of `data` and `ranges` for a tensor of this shape (or number of elements)."""
    numel = shape if isinstance(shape, int) else math.prod(shape)
    groups = quant_groups or 0
    return reference.data_bytes(numel, bits, group_size, groups) + 8 * reference.group_count(
        numel, group_size, groups
    )


def native(device: str = "cpu") -> bool:
    """Return whether the native kernels of this device type (`cpu` or `cuda`) are loaded."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("mesa_tune::quantize", device.upper())


def _check(x: Tensor, bits: int, levels: int | None, group_size: int, quant_groups: int | None) -> int:
    """Return the number of levels; raise if an argument is invalid."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be float32, float16 or bfloat16, but has dtype {x.dtype}: convert it first.")
    if not 1 <= operator.index(bits) <= 8:
        raise ValueError(f"`1 <= bits <= 8` must hold, but got bits={bits}.")
    if levels is None:
        levels = 1 << bits
    elif not 2 <= operator.index(levels) <= 1 << bits:
        raise ValueError(
            f"`2 <= levels <= 2**bits` must hold, but got levels={levels}, bits={bits}:"
            " more levels need more bits."
        )
    _check_groups(x.shape, operator.index(group_size), quant_groups)
    return levels


def _check_groups(shape: Sequence[int], group_size: int, quant_groups: int | None) -> None:
    if quant_groups is None:
        if group_size < 1:
            raise ValueError(f"`group_size >= 1` must hold, but got group_size={group_size}.")
        return
    axis, extent = reference.channels_of(shape)
    if operator.index(quant_groups) < 1 or extent % quant_groups:
        raise ValueError(
            f"`quant_groups` must be positive and divide dimension {axis} of shape {list(shape)}, but got"
            f" quant_groups={quant_groups} for {extent}: choose a divisor, or `group_size` instead."
        )


def _check_out(out: Quantized, result: Quantized) -> None:
    if out[2:] != result[2:]:
        raise ValueError(
            f"`out` must be a result of the same geometry, but has {out[2:]} where {result[2:]} is quantized:"
            " omit `out` when shape, dtype or settings change."
        )


def as_int64(value: int) -> int:
    """Return the int64 with the low 64 bits of `value`."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_calls = itertools.count()


def _seed_tensor(seed: int | Tensor | None, x: Tensor) -> Tensor:
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError(
                "`seed` must be an int or an int64 tensor of one element, but is a tensor of"
                f" {seed.dtype} and shape {list(seed.shape)}."
            )
        return seed
    if seed is not None:
        return torch.full((1,), as_int64(operator.index(seed)), dtype=torch.int64, device=x.device)
    if torch.compiler.is_compiling():
        fresh_seed: Tensor = torch.ops.mesa_tune.fresh_seed.default(x)
        return fresh_seed
    return _fresh_seed(x)


def _fresh_seed(like: Tensor) -> Tensor:
    value = as_int64(torch.initial_seed() + NOISE_STEP * next(_calls))
    return torch.full((1,), value, dtype=torch.int64, device=like.device)


def _quantize_out(
    x: Tensor,
    bits: int,
    levels: int,
    group_size: int,
    quant_groups: int,
    stochastic: bool,
    seed: Tensor | None,
    data: Tensor,
    ranges: Tensor,
) -> None:
    parts = reference.quantize(x, bits, levels, group_size, quant_groups, stochastic, seed)
    data.copy_(parts[0])
    ranges.copy_(parts[1])


def _dequantize_out(
    data: Tensor, ranges: Tensor, bits: int, levels: int, group_size: int, quant_groups: int, out: Tensor
) -> None:
    out.copy_(
        reference.dequantize(data, ranges, out.shape, out.dtype, bits, levels, group_size, quant_groups)
    )


def fake_quantize(
    x: Tensor,
    bits: int,
    levels: int,
    group_size: int,
    quant_groups: int,
    stochastic: bool,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    numel = x.numel()
    data = x.new_empty(reference.data_bytes(numel, bits, group_size, quant_groups), dtype=torch.uint8)
    return data, x.new_empty(reference.group_count(numel, group_size, quant_groups), 2, dtype=torch.float32)


def _fake_quantize_ends(x: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    data, ranges = fake_quantize(x, *settings)
    return data, ranges.to(x.dtype)


def _fake_quantize_rows(
    x: Tensor, bits: int, levels: int, group_size: int, *noise: Any
) -> tuple[Tensor, Tensor, Tensor]:
    data, ranges = fake_quantize(x, bits, levels, group_size, 0, *noise)
    return data, ranges.to(x.dtype), _fake_pack_zero_rows(x)


def _fake_dequantize(
    data: Tensor, ranges: Tensor, shape: Sequence[int], dtype: torch.dtype, *arguments: Any
) -> Tensor:
    return data.new_empty(shape, dtype=dtype)


def _fake_pack_bits(mask: Tensor) -> Tensor:
    return mask.new_empty(reference.plane_bytes(mask.numel()), dtype=torch.uint8)


def _fake_unpack_bits(data: Tensor, shape: Sequence[int]) -> Tensor:
    return data.new_empty(shape, dtype=torch.bool)


def _fake_pack_zero_rows(x: Tensor) -> Tensor:
    return x.new_empty(reference.plane_bytes(math.prod(x.shape[:-1])), dtype=torch.uint8)


def _fake_fresh_seed(like: Tensor) -> Tensor:
    return like.new_empty(1, dtype=torch.int64)


def nothing(*arguments: object) -> None:
    """Fake kernel of an op without results."""


_KERNELS: Kernels = {
    "quantize": (reference.quantize, fake_quantize),
    "quantize_ends": (reference.quantize_ends, _fake_quantize_ends),
    "quantize_rows": (reference.quantize_rows, _fake_quantize_rows),
    "quantize_out": (_quantize_out, nothing),
    "dequantize": (reference.dequantize, _fake_dequantize),
    "dequantize_out": (_dequantize_out, nothing),
    "pack_bits": (reference.pack_bits, _fake_pack_bits),
    "unpack_bits": (reference.unpack_bits, _fake_unpack_bits),
    "pack_zero_rows": (reference.pack_zero_rows, _fake_pack_zero_rows),
    "fresh_seed": (_fresh_seed, _fake_fresh_seed),
}


def define(kind: str, schemas: Sequence[str], kernels: Kernels) -> torch.library.Library:
    """Define ops of the namespace `mesa_tune`, which live as long as the returned library.

    `kind`: `DEF` for the first library of the namespace, `FRAGMENT` for others. `kernels`: the default kernel
    and the fake kernel of each op, by name.
    """
    library = torch.library.Library("mesa_tune", kind)
    for schema in schemas:
        random = (torch.Tag.nondeterministic_seeded,) if schema.startswith("fresh_seed") else ()
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *random))
    for name, (default, fake) in kernels.items():
        library.impl(name, default, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mesa_tune::{name}", fake, lib=library)
    return library


def _load() -> None:
    if os.environ.get("MESA_TUNE_REFERENCE") == "1":
        return
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:  # not built, or built for another system
        warnings.warn(
            f"mesa-tune's native kernels are not loaded ({error}), so quantization runs in plain PyTorch,"
            " many times slower: `mesa-tune doctor` says how to build them.",
            stacklevel=2,
        )


_library = define("DEF", _SCHEMAS, _KERNELS)
_load()
