"""What no CPU can show: mesa-tune on one GPU, what matters most first.

    python benchmarks/gpu.py [--minutes 25] [--units codec,step]
    python benchmarks/gpu.py --device cpu --small --results FILE    # the same at small sizes, without a GPU
    python benchmarks/gpu.py --docs                                 # writes docs/gpu.md

Each unit runs in a process of its own, for 9 minutes at most. Run again, it goes on: a unit that has a result
of the same code on the same device is left out. Nothing is downloaded. The units: the tests that need a GPU;
memory, predicted and allocated; codecs beside `copy_`; steps of four models in several ways; the largest
batch under a limit, promised and true, and samples per second at it.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, ROOT, code_of, header, json_lines, spread
from gpu_page import write
from step import KINDS, Kind, Stepper, Subject
from zoo import ZOO, ZooModel, configured, workload

import mesa_tune as mt
from mesa_tune import ops
from mesa_tune.profiler.entries import fast_grid
from mesa_tune.profiler.memory.meter import unless_out_of_memory

MINUTES, LONGEST_S = 25, 540
LONG_S, FEWEST = 5.0, 3
BILLION = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
BILLION |= {"intermediate_size": 8192, "vocab_size": 32_000, "use_cache": False}
ZOO["llama_1b"] = ZooModel(
    "Llama-style, 1 B",
    configured("LlamaConfig", "LlamaForCausalLM", BILLION, {}),
    ZOO["llama"].batch,
    ZOO["llama"].loss,
)


class Setting(NamedTuple):
    """Where to run, and whether at small sizes."""

    device: str
    small: bool


class Size(NamedTuple):
    """Batch size of steps; the class of the blocks to checkpoint."""

    batch: int
    block: str


SIZES = {
    "deit_s": Size(128, "DeiTLayer"),
    "gpt2": Size(16, "GPT2Block"),
    "resnet_50": Size(128, "ResNetBottleNeckLayer"),
    "llama_1b": Size(4, "LlamaDecoderLayer"),
}
LIMIT, SMALL_LIMIT = 16 * 10**9, 32 * 10**6
BUDGETS = ("50%", "65%", "80%")
WAYS = {"plain": KINDS["plain"], "uniform 4 bits": KINDS["uniform 16"]}


def tests(setting: Setting) -> dict[str, Any]:
    """Run the tests that need a GPU; return pytest's last line."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    lines = done.stdout.strip().splitlines() or [done.stderr[-500:]]
    return {"summary": lines[-1], "failed": failed, "status": done.returncode}


def memory(setting: Setting) -> dict[str, Any]:
    """Return what steps save and allocate, cuBLAS's workspaces left out, beside what was predicted."""
    library_bytes(setting)
    sizes = {"deit_s": 32, "resnet_50": 32, "gpt2": 4}
    return {
        "rows": {
            f"{name}, {way}": guarded(partial(one_memory, name, kind, 2 if setting.small else size, setting))
            for name, size in sizes.items()
            for way, kind in WAYS.items()
        }
    }


def one_memory(name: str, kind: Kind, batch: int, setting: Setting) -> dict[str, Any]:
    """Return saved and allocated bytes of a step, and predicted ones."""
    fit = mt.estimate(subject_of(name, setting, batch), kind.policy)
    step = stepper_of(name, kind, setting, batch).bytes()
    return {
        "predicted_saved": fit.saved_bytes,
        "saved": step.saved_bytes,
        "predicted_peak": fit.peak_bytes,
        "allocated": step.peak_bytes,
    }


def codec(setting: Setting) -> dict[str, Any]:
    """Return the bandwidth of encoding and of decoding as shares of that of `copy_`."""
    rows = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1 << (16 if setting.small else 26), device=setting.device).to(dtype)
        out = torch.zeros_like(x)
        copy_s = seconds(partial(out.copy_, x), setting)
        for bits in (1, 2, 4, 8):
            packed = ops.quantize(x, bits, seed=1)
            moved = x.nbytes + packed.nbytes
            calls: dict[str, Callable[[], Any]] = {
                "encode": partial(ops.quantize, x, bits, seed=1),
                "decode": partial(ops.dequantize, packed, out=out),
            }
            rows[f"{dtype} {bits} bits".removeprefix("torch.")] = {
                name: (moved / seconds(call, setting)) / (2 * x.nbytes / copy_s)
                for name, call in calls.items()
            }
    return {"native": ops.native(setting.device), "copy_gb_per_s": 2 * x.nbytes / copy_s / 1e9, "rows": rows}


def seconds(call: Callable[[], object], setting: Setting, rounds: int = 9) -> float:
    """Return the median seconds of `call`, which runs twice before; of fewer rounds where it takes long."""
    times: list[float] = []
    for number in range(rounds + 2):
        if sum(times) > LONG_S and len(times) >= FEWEST:
            break
        synchronize(setting)
        start = time.perf_counter()
        call()
        synchronize(setting)
        times += [time.perf_counter() - start] if number > 1 else []
    return spread(times).median


def synchronize(setting: Setting) -> None:
    """Wait until the device has done what it was told."""
    if setting.device != "cpu":
        torch.cuda.synchronize()


def steps(name: str, compiled: bool, setting: Setting) -> dict[str, Any]:
    """Return time and memory of a step of the model `name` in each way, and what was predicted."""
    work = subject_of(name, setting)
    ways = {**WAYS, "searched": Kind(searched(mt.profile(work, options=fast_grid())))}
    ways["checkpoint per block"] = KINDS["checkpoint per block"]
    if not compiled:
        ways["save_on_cpu"] = KINDS["save_on_cpu"]
    rows = {
        way: guarded(partial(one_step, name, kind, compiled, None, setting)) for way, kind in ways.items()
    }
    if compiled:
        rows["activation_memory_budget 0.5"] = guarded(
            partial(one_step, name, KINDS["plain"], True, 0.5, setting)
        )
    else:
        for way in ("plain", "uniform 4 bits", "searched"):
            fit = mt.estimate(work, ways[way].policy)
            rows[way] |= {"predicted_peak": fit.peak_bytes, "predicted_reserved": fit.reserved_bytes}
    if not compiled and setting.device != "cpu":
        for way, kind in WAYS.items():
            replayed = guarded(partial(graphed, name, kind, setting))
            rows[f"{way}, forward and backward as a CUDA graph"] = replayed
    return {"batch": work.batch_size, "library_bytes": library_bytes(setting), "rows": rows}


def library_bytes(setting: Setting) -> int:
    """Return what cuBLAS allocates for products in a forward and in a backward, and keeps."""
    if setting.device == "cpu":
        return 0
    x = torch.ones(64, 64, device=setting.device, requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16):
        (x.to(dtype) @ x.to(dtype)).sum().backward()
    del x
    return int(torch.cuda.memory_allocated())


def graphed(name: str, kind: Kind, setting: Setting) -> dict[str, Any]:
    """Return the milliseconds of a forward and a backward that a CUDA graph replays: no host takes part."""
    stepper = stepper_of(name, kind, setting)

    def passes() -> None:
        with stepper.around():
            loss = stepper.loss(stepper.model, stepper.batch)
        loss.backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            stepper.optimizer.zero_grad(set_to_none=True)
            passes()
    torch.cuda.current_stream().wait_stream(side)
    stepper.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes()
    return {"ms": 1e3 * seconds(graph.replay, setting)}


def stepper_of(name: str, kind: Kind, setting: Setting, batch: int | None = None) -> Stepper:
    """Return a model in training, converted or changed as `kind` says."""
    return Stepper(Subject(name, partial(subject_of, name, setting, batch), SIZES[name].block, 0.0), kind)


def searched(profile: mt.Profile) -> mt.Policy:
    """Return the plan of the fastest step at the lowest of `BUDGETS` that can be reached."""
    for budget in BUDGETS:
        with suppress(mt.BudgetError):
            return mt.search_policy(profile, budget).policy
    return mt.search_policy(profile, objective="memory").policy


def subject_of(name: str, setting: Setting, batch: int | None = None) -> mt.Workload:
    """Return the model as a workload on the device, under autocast to bf16."""
    size = batch or (2 if setting.small else SIZES[name].batch)
    if setting.small:
        name = "llama" if name == "llama_1b" else name
    scale = "tiny" if setting.small else "published"
    return replace(workload(name, size, scale=scale, autocast="bfloat16"), device=setting.device)


def one_step(name: str, kind: Kind, compiled: bool, budget: float | None, setting: Setting) -> dict[str, Any]:
    """Return milliseconds of a step, and the most bytes allocated and reserved in it besides cuBLAS's."""
    libraries = library_bytes(setting)
    stepper = stepper_of(name, kind, setting)
    if compiled:
        torch._dynamo.reset()
        stepper.model = torch.compile(stepper.model)  # type: ignore[assignment]
    around = nullcontext() if budget is None else _memory_budget(budget)
    with around:
        milliseconds = 1e3 * seconds(stepper.step, setting, 3 if setting.small else 10)
        if setting.device == "cpu":
            memory = {"allocated": None if compiled else stepper.bytes().peak_bytes, "reserved": None}
        else:
            torch.cuda.reset_peak_memory_stats()
            stepper.step()
            memory = {
                "allocated": torch.cuda.max_memory_allocated() - libraries,
                "reserved": torch.cuda.max_memory_reserved() - libraries,
            }
    return {"ms": milliseconds, **memory}


def _memory_budget(budget: float) -> Any:
    from torch._functorch import config

    return config.patch(activation_memory_budget=budget)  # type: ignore[attr-defined]


def guarded(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `measure` returns, or its error; free the device's memory afterwards."""
    try:
        return unless_out_of_memory(measure) or {"error": "out of memory"}
    except Exception as error:  # noqa: BLE001 (whatever one way raises belongs to the results)
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def largest(name: str, setting: Setting) -> dict[str, Any]:
    """Return the largest batch under a limit, promised and true, and samples per second at the true one."""
    limit = SMALL_LIMIT if setting.small else LIMIT
    rows = {}
    for way, policy in {"plain": None, "uniform 4 bits": mt.Policy.uniform(level=16)}.items():
        promised = mt.estimate(subject_of(name, setting), policy).largest_batch(limit)
        row: dict[str, Any] = {"promised": promised}
        if setting.device != "cpu":  # whose allocator takes no limit
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(limit / total)
            row["true"] = bisected(
                lambda batch, policy=policy: trains(name, policy, batch, setting), promised
            )
        batch = max(1, row.get("true", promised))
        row["samples_per_s"] = rate(name, policy, batch, setting)
        rows[way] = row
    return {"limit": limit, "rows": rows}


def bisected(works: Callable[[int], bool], guess: int) -> int:
    """Return the largest batch size that `works`, near `guess`; 0 if none does."""
    low, high = 0, max(1, guess)
    while works(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def trains(name: str, policy: mt.Policy | None, batch: int, setting: Setting) -> bool:
    """Return whether two steps at this batch size fit in memory."""
    return unless_out_of_memory(lambda: rate(name, policy, batch, setting, rounds=1)) is not None


def rate(name: str, policy: mt.Policy | None, batch: int, setting: Setting, rounds: int = 3) -> float:
    """Return samples per second."""
    return batch / seconds(stepper_of(name, Kind(policy), setting, batch).step, setting, rounds)


def units() -> dict[str, Callable[[Setting], dict[str, Any]]]:
    """Return the units by name, what matters most first."""
    chosen: dict[str, Callable[[Setting], dict[str, Any]]] = {
        "tests": tests,
        "memory": memory,
        "codec": codec,
    }
    chosen |= {f"step {name}": partial(steps, name, False) for name in SIZES}
    chosen |= {f"largest {name}": partial(largest, name) for name in SIZES}
    chosen |= {f"compiled {name}": partial(steps, name, True) for name in SIZES}
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="begin no unit after so many")
    parser.add_argument("--units", default="", help="only units that begin with one of these, with commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu.jsonl")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--docs", action="store_true", help="write docs/gpu.md from the results")
    arguments = parser.parse_args()
    setting = Setting(arguments.device, arguments.small)
    if arguments.docs:
        print(f"wrote {write(json_lines(arguments.results))}")
    elif arguments.run:
        print(json.dumps({**header(), **units()[arguments.run](setting)}))
    else:
        campaign(
            setting, arguments.results, arguments.minutes, tuple(filter(None, arguments.units.split(",")))
        )


def campaign(setting: Setting, results: Path, minutes: float, wanted: tuple[str, ...]) -> None:
    """Run the units that have no result yet, and append each to `results`."""
    begin, key = time.monotonic(), {"device": setting.device, "small": setting.small, "code": code()}
    for name in missing(json_lines(results), key, wanted):
        if time.monotonic() - begin > 60 * minutes:
            print(f"{minutes:g} minutes are over; the same command goes on with {name!r}")
            return
        line = {"unit": name, **key, **run(name, setting)}
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{name}: {describe(line)}", flush=True)


def describe(line: Mapping[str, Any]) -> str:
    """Return the error of a unit, or its seconds."""
    return line["error"] if "error" in line else f"{line['seconds']:.0f} s"


def missing(lines: list[dict[str, Any]], key: Mapping[str, Any], wanted: tuple[str, ...]) -> Iterator[str]:
    """Yield the units, in order, without a result under this key."""
    done = {line["unit"] for line in lines if key.items() <= line.items() and "error" not in line}
    for name in units():
        if name not in done and (not wanted or name.startswith(wanted)):
            yield name


def run(name: str, setting: Setting) -> dict[str, Any]:
    """Run a unit in a process of its own; return its result with its seconds, or an error."""
    command = [sys.executable, "-W", "ignore", __file__, "--run", name, "--device", setting.device]
    command += ["--small"] if setting.small else []
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {LONGEST_S} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "seconds": time.monotonic() - start}


def code() -> str:
    """Return a hash of the sources that the results depend on."""
    return code_of(
        ("ops", "codecs", "engine", "formulas", "conversion", "workload", "profiler"), Path(__file__)
    )


if __name__ == "__main__":
    main()
