"""How fast do the CPU kernels encode and decode, relative to `copy_` of the same tensor?

    python benchmarks/quantize.py [--bits 4 8] [--dtypes float32] [--paths avx512 avx2] [--rounds 9]

Before timing, the kernels must give the reference's bytes at every width, dtype and vector path that is
timed. Then each round times copy, encode and decode, into memory that was written before, and encode and
decode are divided by the copy of the same round: only ratios mean something on a shared machine. Each vector
path runs in its own process, chosen by ATEN_CPU_CAPABILITY as for torch's own kernels. Paths are compared by
their ratios to `copy_`, which memory bandwidth limits on all of them. Every figure is printed with its limit.

On a machine with a GPU the CUDA kernels follow: 2^28 bfloat16 elements at 4 bits, timed by events; the result
is the bytes moved per second, relative to `copy_` on the device.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from operator import truediv
from typing import Any

import torch
from common import append, ratios, spread
from torch import Tensor

from mesa_tune import ops
from mesa_tune.ops import reference

GROUP_SIZE = 256
CHECKED = 1 << 20  # elements of the check, which has an incomplete last group
SEED = torch.tensor([1])
PATHS = {"AVX512": ("avx512", "avx2", "default"), "AVX2": ("avx2", "default")}
# Limits in units of `copy_` of float32; doubled for 16-bit dtypes, whose copy moves half the bytes.
ENCODE, ENCODE_ELSE = {2: 2.5, 4: 2.2, 8: 2.5}, 3.5
DECODE, DECODE_ELSE = {4: 1.6, 8: 1.6}, 2.2
AVX2_BOUND = 2.0  # in units of the AVX-512 path's time
ON_GPU, GPU_BITS, GPU_BOUND = 1 << 28, 4, 0.8  # bfloat16 elements; smallest share of copy's bandwidth
CaseResult = dict[str, Any]


def main() -> None:
    arguments = parse()
    if not ops.native():
        sys.exit("the native kernels are not loaded: `mesa-tune doctor` says how to build them")
    if arguments.child:
        json.dump(list(cases(arguments)), sys.stdout)
        return
    results: dict[str, list[CaseResult]] = {}
    for path in arguments.paths:
        results[path] = in_process(path)
        for case, widest in zip(results[path], results[arguments.paths[0]], strict=True):
            print(describe(case, widest), flush=True)
    result: CaseResult = {
        "subject": "quantize and dequantize",
        "elements": f"2^{arguments.size}",
        "paths": results,
    }
    if torch.cuda.is_available():
        result["cuda"] = on_gpu(arguments.rounds)
    print(f"appended to {append('quantize', result)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    paths = PATHS.get(torch.backends.cpu.get_cpu_capability(), ("default",))
    parser.add_argument("--bits", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--paths", nargs="+", choices=paths, default=list(paths))
    parser.add_argument("--size", type=int, default=25, help="log2 of the elements")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--child", action="store_true", help="time this process's path; JSON to stdout")
    return parser.parse_args()


def in_process(path: str) -> list[CaseResult]:
    """Return the cases, timed by a process with this vector path."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": path}
    command = [sys.executable, *sys.argv, "--child"]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        sys.exit(process.returncode)
    cases: list[CaseResult] = json.loads(process.stdout)
    return [{"path": path, **case} for case in cases]


def cases(arguments: argparse.Namespace) -> Sequence[CaseResult]:
    """Return one result per dtype and width, measured in this process."""
    results = []
    for name in arguments.dtypes:
        x = torch.randn(1 << arguments.size).to(getattr(torch, name))
        for bits in arguments.bits:
            check(x[: CHECKED - 7], bits)
            results.append({"dtype": name, "bits": bits, **measure(x, bits, arguments.rounds)})
    return results


def check(x: Tensor, bits: int) -> None:
    """Exit unless kernel and reference give the same bytes and the same tensor."""
    sizes = (bits, 1 << bits, GROUP_SIZE, 0)
    data, ranges = torch.ops.mesa_tune.quantize(x, *sizes, True, SEED)
    expected = reference.quantize(x, *sizes, True, SEED)
    decoded = torch.ops.mesa_tune.dequantize(data, ranges, x.shape, x.dtype, *sizes)
    same = torch.equal(data, expected[0]) and torch.equal(ranges, expected[1])
    if not same or not torch.equal(decoded, reference.dequantize(data, ranges, x.shape, x.dtype, *sizes)):
        sys.exit(f"kernel and reference differ at {bits} bits, {x.dtype}")


def measure(x: Tensor, bits: int, rounds: int) -> CaseResult:
    """Return milliseconds, and ratios to the copy of the same round: medians with quartiles."""
    packed, out = ops.quantize(x, bits, GROUP_SIZE, seed=SEED), torch.zeros_like(x)
    times = in_turn(x, packed, out, rounds, timed)
    return {
        "ms": {name: spread(values)._asdict() for name, values in times.items()},
        "times_copy": {name: ratios(times["copy"], times[name])._asdict() for name in ("encode", "decode")},
    }


def in_turn(
    x: Tensor, packed: ops.Quantized, out: Tensor, rounds: int, clock: Callable[[Callable[[], Any]], float]
) -> dict[str, list[float]]:
    """Return the milliseconds of copy, encode and decode in each round."""
    seed = SEED.to(x.device)
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: out.copy_(x),
        "encode": lambda: ops.quantize(x, packed.bits, GROUP_SIZE, seed=seed, out=packed),
        "decode": lambda: ops.dequantize(packed, out=out),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-1, rounds):
        for name, call in calls.items():
            elapsed = clock(call)
            if turn >= 0:  # the first round warms up
                times[name].append(elapsed)
    return times


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def timed_on_gpu(call: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def on_gpu(rounds: int) -> CaseResult:
    """Return the times of the CUDA kernels, and their share of a copy's bandwidth in each round."""
    if not ops.native("cuda"):
        sys.exit("there are no CUDA kernels in the library: `mesa-tune doctor` says how to build them")
    x = torch.randn(ON_GPU, device="cuda", dtype=torch.bfloat16)
    check_on_gpu(x[: CHECKED - 7])
    packed = ops.quantize(x, GPU_BITS, GROUP_SIZE, seed=SEED)
    times = in_turn(x, packed, torch.empty_like(x), rounds, timed_on_gpu)
    moved = (x.nbytes + packed.nbytes) / (2 * x.nbytes)
    result: CaseResult = {"ms": {name: spread(values)._asdict() for name, values in times.items()}}
    for name in ("encode", "decode"):
        share = spread([moved * value for value in map(truediv, times["copy"], times[name])])
        result[name] = {"of_copy_bandwidth": share._asdict()}
        outcome = "reached" if share.median >= GPU_BOUND else "NOT REACHED"
        milliseconds = result["ms"][name]["median"]
        print(f"CUDA, bfloat16, {GPU_BITS} bits: {name} {milliseconds:.3f} ms,", end=" ")
        print(f"{share.median:.2f} of copy's bandwidth (at least {GPU_BOUND}: {outcome})", flush=True)
    return result


def check_on_gpu(x: Tensor) -> None:
    """Exit unless the kernels of CPU and GPU give the same bytes and the same tensor."""
    host, device = (ops.quantize(t, GPU_BITS, GROUP_SIZE, seed=SEED) for t in (x.cpu(), x))
    same = torch.equal(host.data, device.data.cpu()) and torch.equal(host.ranges, device.ranges.cpu())
    if not same or not torch.equal(ops.dequantize(host), ops.dequantize(device).cpu()):
        sys.exit("the kernels of CPU and GPU differ")


def bounds(case: Mapping[str, Any]) -> dict[str, float]:
    """Return the limits of encode and decode on the widest path, in units of `copy_`."""
    factor = 1.0 if case["dtype"] == "float32" else 2.0
    return {
        "encode": factor * ENCODE.get(case["bits"], ENCODE_ELSE),
        "decode": factor * DECODE.get(case["bits"], DECODE_ELSE),
    }


def describe(case: Mapping[str, Any], widest: Mapping[str, Any]) -> str:
    """Return one line: each figure, its limit, and whether it is reached."""
    parts = [
        f"{case['path']}, {case['dtype']}, {case['bits']} bits: copy {case['ms']['copy']['median']:.1f} ms"
    ]
    for name, bound in bounds(case).items():
        times = case["times_copy"][name]["median"]
        text = f"{name} {case['ms'][name]['median']:.1f} ms, {times:.2f} times copy"
        if case["path"] == widest["path"] != "default":
            text += verdict(times, bound)
        elif case["path"] == "avx2":
            ratio = times / widest["times_copy"][name]["median"]
            text += f", {ratio:.2f} times {widest['path']}" + verdict(ratio, AVX2_BOUND)
        parts.append(text)
    return "; ".join(parts)


def verdict(times: float, bound: float) -> str:
    return f" (at most {bound:.1f}: {'reached' if times <= bound else 'NOT REACHED'})"


if __name__ == "__main__":
    main()
