"""What `gpu.py` measures, unit by unit: each returns what belongs to the results."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from common import ROOT, spread
from meters import within_memory_budget
from step import KINDS, Kind, Stepper, Subject
from torch._C._autograd import DeviceType
from zoo import ZOO, ZooModel, configured, workload

import mesa_tune as mt
from mesa_tune import ops
from mesa_tune.measure.memory.meter import unless_out_of_memory
from mesa_tune.profiles.entries import fast_grid

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
    "llama_1b": Size(4, "LlamaDecoderLayer"),
    "resnet_50": Size(128, "ResNetBottleNeckLayer"),
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
    """Return the bandwidth of encoding and of decoding as shares of that of `copy_`, by kernels alone."""
    rows, seed = {}, torch.ones(1, dtype=torch.int64, device=setting.device)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1 << (16 if setting.small else 26), device=setting.device).to(dtype)
        out = torch.zeros_like(x)
        copy_s = kernel_seconds(partial(out.copy_, x), setting)
        for bits in (1, 2, 4, 8):
            packed = ops.quantize(x, bits, seed=seed)
            moved = x.nbytes + packed.nbytes
            calls: dict[str, Callable[[], Any]] = {
                "encode": partial(ops.quantize, x, bits, seed=seed),
                "decode": partial(ops.dequantize, packed, out=out),
            }
            rows[f"{dtype} {bits} bits".removeprefix("torch.")] = {
                name: (moved / kernel_seconds(call, setting)) / (2 * x.nbytes / copy_s)
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


def kernel_seconds(call: Callable[[], object], setting: Setting, calls: int = 20) -> float:
    """Return the seconds of one call on the device, of a CUDA graph of `calls` of them between two events."""
    if setting.device == "cpu":
        return seconds(call, setting)
    graph, start, end = captured(lambda: [call() for _ in range(calls)]), *events()
    times = []
    for _ in range(9):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return spread(times).median


def events() -> list[torch.cuda.Event]:
    """Return two events that note the time."""
    return [torch.cuda.Event(enable_timing=True) for _ in range(2)]


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of `call`, which runs three times before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def kernel_sum_ms(step: Callable[[], object]) -> float:
    """Return the milliseconds of a step's kernels and copies on the device, by PyTorch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    on_device = (event for event in profiled.events() or () if event.device_type == DeviceType.CUDA)
    return sum(event.self_device_time_total for event in on_device if not event.is_user_annotation) / 1e3


def synchronize(setting: Setting) -> None:
    """Wait until the device has done what it was told."""
    if setting.device != "cpu":
        torch.cuda.synchronize()


def steps(name: str, compiled: bool, setting: Setting) -> dict[str, Any]:
    """Return time and memory of a step of the model `name` in each way, and what was predicted."""
    work = subject_of(name, setting)
    ways = {**WAYS, "checkpoint per block": KINDS["checkpoint per block"]}
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
        for way, kind in WAYS.items():
            rows[way] |= predicted(work, kind)
            if setting.device != "cpu":
                replayed = guarded(partial(graphed, name, kind, setting))
                rows[f"{way}, forward and backward as a CUDA graph"] = replayed
    return {"batch": work.batch_size, "library_bytes": library_bytes(setting), "rows": rows}


def predicted(work: mt.Workload, kind: Kind) -> dict[str, int]:
    """Return the bytes that the allocator should have at most, allocated and reserved."""
    fit = mt.estimate(work, kind.policy)
    return {"predicted_peak": fit.peak_bytes, "predicted_reserved": fit.reserved_bytes}


def planned(name: str, setting: Setting) -> dict[str, Any]:
    """Return time and memory of a step under a searched policy, eager and compiled, beside plain's."""
    work = subject_of(name, setting)
    kinds = {"plain": WAYS["plain"], "searched": Kind(searched(mt.profile(work, options=fast_grid())))}
    rows = {}
    for way, kind in kinds.items():
        rows[way] = guarded(partial(one_step, name, kind, False, None, setting)) | predicted(work, kind)
        if not setting.small:  # compiling takes minutes on a CPU
            rows[f"{way}, compiled"] = guarded(partial(one_step, name, kind, True, None, setting))
    return {"batch": work.batch_size, "rows": rows}


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
        stepper.optimizer.zero_grad(set_to_none=True)
        with stepper.around():
            loss = stepper.loss(stepper.model, stepper.batch)
        loss.backward()

    return {"ms": 1e3 * seconds(captured(passes).replay, setting)}


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
    """Return milliseconds of a step and of its kernels; the most bytes that it allocates besides cuBLAS's."""
    libraries = library_bytes(setting)
    stepper = stepper_of(name, kind, setting)
    if compiled:
        torch._dynamo.reset()
        stepper.model = torch.compile(stepper.model)  # type: ignore[assignment]
    with within_memory_budget(budget):
        milliseconds = 1e3 * seconds(stepper.step, setting, 3 if setting.small else 10)
        if setting.device == "cpu":
            memory = {"allocated": None if compiled else stepper.bytes().peak_bytes, "reserved": None}
        else:
            torch.cuda.reset_peak_memory_stats()
            stepper.step()
            memory = {
                "allocated": torch.cuda.max_memory_allocated() - libraries,
                "reserved": torch.cuda.max_memory_reserved() - libraries,
                "kernels_ms": kernel_sum_ms(stepper.step),
            }
    return {"ms": milliseconds, **memory}


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
    for way, (policy, *_) in WAYS.items():
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
    chosen: dict[str, Callable[[Setting], dict[str, Any]]] = {"tests": tests}
    chosen |= {f"step {name}": partial(steps, name, False) for name in SIZES}
    chosen |= {"memory": memory, "codec": codec, "step resnet_50": chosen.pop("step resnet_50")}
    chosen |= {f"searched {name}": partial(planned, name) for name in SIZES}
    chosen |= {f"largest {name}": partial(largest, name) for name in SIZES}
    chosen |= {f"compiled {name}": partial(steps, name, True) for name in SIZES}
    return chosen
