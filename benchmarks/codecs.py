"""How fast are the codecs' native ops, relative to plain PyTorch and to `copy_` of the same tensor?

    python benchmarks/codecs.py [--size 22] [--rounds 5]

Before timing, a kernel must give the reference's bytes. Then all three are timed in turn.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import append, ratios, spread
from quantize import timed
from torch import Tensor

from mesa_tune import ops
from mesa_tune.ops import reference
from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.reference import codecs as reference_codecs
from mesa_tune.ops.reference import windows as reference_windows

SEED = torch.tensor([1])
DROPPED = 0.9
Case = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", type=int, default=22, help="log2 of the elements")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not ops.native():
        sys.exit("the native kernels are not loaded: `mesa-tune doctor` says how to build them")
    results = {}
    for name, case in cases(torch.randn(1 << arguments.size)).items():
        results[name] = measure(name, case, arguments.rounds)
        milliseconds, speedup = results[name]["ms"]["native"], results[name]["times_the_reference"]
        ratio = results[name]["times_copy"]["median"]
        print(
            f"{name}: {milliseconds['median']:.1f} ms, {ratio:.1f} times copy,"
            f" {speedup['median']:.0f} times as fast as the reference",
            flush=True,
        )
    result = {"subject": "ops of the codecs", "elements": f"2^{arguments.size}", "cases": results}
    print(f"appended to {append('codecs', result)}")


def cases(x: Tensor) -> dict[str, Case]:
    """Return kernel, reference, arguments and source tensor of each op."""
    sizes = (4, 16, 256, 0)
    ranges = reference_codecs.extents(x, 256, 0)
    ranges = reference.ranges_of(ranges[:, 0], ranges[:, 1], 16)
    bitmap, survivors = RAW.sparsify(x, int(x.numel() * (1 - DROPPED)))
    mask = x > 0
    pooled = x.view(16, 64, 64, -1)
    y, indices = F.max_pool2d(pooled, 3, 2, 1, return_indices=True)
    shape = zip(pooled.shape[2:], y.shape[2:], strict=True)
    windows = reference_windows.flattened([reference_windows.Windows(*pair, 3, 1, 2, 1) for pair in shape])
    packed, offsets = ops.pack_bits(mask), RAW.pack_windows(indices, windows)
    raw = torch.ops.mesa_tune
    return {
        "extents": (RAW.extents, reference_codecs.extents, (x, 256, 0), x),
        "quantize_within": (
            RAW.quantize_within,
            reference_codecs.quantize_within,
            (x, ranges, *sizes, True, SEED),
            x,
        ),
        "sparsify": (RAW.sparsify, reference_codecs.sparsify, (x, survivors.numel()), x),
        "densify": (RAW.densify, reference_codecs.densify, (bitmap, survivors, x.shape), x),
        "pack_bits": (raw.pack_bits, reference.pack_bits, (mask,), mask),
        "unpack_bits": (raw.unpack_bits, reference.unpack_bits, (packed, mask.shape), mask),
        "pack_windows": (RAW.pack_windows, reference_windows.pack_windows, (indices, windows), indices),
        "unpack_windows": (
            RAW.unpack_windows,
            reference_windows.unpack_windows,
            (offsets, windows, indices.shape),
            indices,
        ),
    }


def measure(name: str, case: Case, rounds: int) -> dict[str, Any]:
    """Return milliseconds, and ratios within a round; exit if kernel and reference differ."""
    native, plain, arguments, source = case
    actual, expected = (
        output if isinstance(output, tuple) else (output,)
        for output in (native(*arguments), plain(*arguments))
    )
    if not all(torch.equal(*pair) for pair in zip(actual, expected, strict=True)):
        sys.exit(f"kernel and reference differ: {name}")
    out = torch.zeros_like(source)
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: out.copy_(source),
        "native": lambda: native(*arguments),
        "reference": lambda: plain(*arguments),
    }
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    for _ in range(rounds):
        for kind, call in calls.items():
            times[kind].append(timed(call))
    return {
        "ms": {kind: spread(values)._asdict() for kind, values in times.items()},
        "times_copy": ratios(times["copy"], times["native"])._asdict(),
        "times_the_reference": ratios(times["native"], times["reference"])._asdict(),
    }


if __name__ == "__main__":
    main()
