"""How fast do the CPU kernels encode and decode, beside the reference and a `copy_` of the same source?

    python benchmarks/quantize.py [--bits 1 2 4 8] [--sizes 22 25] [--rounds 15]

Correctness comes first: the kernels must give the reference's bytes at every size and width that is timed.
Then everything takes turns (copy, encode, decode, and the reference in every fifth round), into memory that
has been touched; only ratios within a round count on a shared machine. Bandwidth is bytes read plus bytes
written over time, as a fraction of what `copy_` reaches.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from common import append, ratios, spread
from torch import Tensor

from mesa_tune import ops, reference

GROUP_SIZE = 256
REFERENCE_EVERY = 5
SEED = torch.tensor([1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[22, 25], help="log2 of the elements (float32)"
    )
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if not ops.native():
        sys.exit("the native kernels are not loaded: `mesa-tune doctor` says how to build them")
    cases = []
    for size in arguments.sizes:
        x = torch.randn(1 << size)
        for bits in arguments.bits:
            check(x, bits)
            cases.append({"log2_elements": size, "bits": bits, **measure(x, bits, arguments.rounds)})
            print(describe(cases[-1]), flush=True)
    print(f"appended to {append('quantize', {'subject': 'quantize and dequantize', 'cases': cases})}")


def check(x: Tensor, bits: int) -> None:
    """Stops unless kernel and reference give the same bytes and the same tensor."""
    sizes = (bits, 1 << bits, GROUP_SIZE, 0)
    data, ranges = torch.ops.mesa_tune.quantize(x, *sizes, True, SEED)
    expected = reference.quantize(x, *sizes, True, SEED)
    decoded = torch.ops.mesa_tune.dequantize(data, ranges, x.shape, x.dtype, *sizes)
    same = torch.equal(data, expected[0]) and torch.equal(ranges, expected[1])
    if not same or not torch.equal(decoded, reference.dequantize(data, ranges, x.shape, x.dtype, *sizes)):
        sys.exit(f"kernel and reference differ at {bits} bits and {x.numel()} elements")


def measure(x: Tensor, bits: int, rounds: int) -> dict[str, Any]:
    """Milliseconds, speed-ups over the reference and bandwidth as a fraction of copy's, with their spread."""
    packed, out = ops.quantize(x, bits, GROUP_SIZE, seed=SEED), torch.zeros_like(x)
    sizes = (bits, 1 << bits, GROUP_SIZE, 0)
    native: dict[str, Callable[[], Any]] = {
        "copy": lambda: out.copy_(x),
        "encode": lambda: ops.quantize(x, bits, GROUP_SIZE, seed=SEED, out=packed),
        "decode": lambda: ops.dequantize(packed, out=out),
    }
    plain: dict[str, Callable[[], Any]] = {
        "reference encode": lambda: reference.quantize(x, *sizes, True, SEED),
        "reference decode": lambda: reference.dequantize(
            packed.data, packed.ranges, x.shape, x.dtype, *sizes
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in (*native, *plain)}
    for turn in range(-1, rounds):
        due = native if turn % REFERENCE_EVERY else {**native, **plain}
        for name, call in due.items():
            elapsed = timed(call)
            if turn >= 0:  # the first round warms up
                times[name].append(elapsed)
    return {
        "ms": {name: spread(values)._asdict() for name, values in times.items()},
        "times_the_reference": {name: speedup(times, name) for name in ("encode", "decode")},
        "of_copy_bandwidth": {name: bandwidth(times, name, x, packed) for name in ("encode", "decode")},
    }


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def speedup(times: Mapping[str, list[float]], name: str) -> dict[str, float]:
    """The reference's time over the kernel's in the rounds that have both."""
    return ratios(times[name][::REFERENCE_EVERY], times[f"reference {name}"])._asdict()


def bandwidth(
    times: Mapping[str, list[float]], name: str, x: Tensor, packed: ops.Quantized
) -> dict[str, float]:
    """Bytes moved a second over those of `copy_`, round by round."""
    moved = (x.nbytes + packed.nbytes) / (2 * x.nbytes)
    return {key: moved * value for key, value in ratios(times[name], times["copy"])._asdict().items()}


def describe(case: Mapping[str, Any]) -> str:
    """One line for people."""
    parts = [f"2^{case['log2_elements']} elements, {case['bits']} bits:"]
    for name in ("encode", "decode"):
        faster = case["times_the_reference"][name]["median"]
        share = case["of_copy_bandwidth"][name]["median"]
        milliseconds = case["ms"][name]["median"]
        parts.append(f"{name} {milliseconds:.1f} ms ({faster:.0f} times the reference, {share:.2f} of copy)")
    return " ".join(parts)


if __name__ == "__main__":
    main()
