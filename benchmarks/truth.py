"""Are predicted bytes true? Predictions beside two meters that share no code with mesa-tune, on whole steps.

    python benchmarks/truth.py [--models deit_ti,gpt2] [--jobs 2]    # appends to build/truth/results.jsonl
    python benchmarks/truth.py --docs    # appends to results/truth.jsonl, and writes docs/truth.md from that

Each model is trained plainly, with accumulation, with checkpointed blocks and under bf16 autocast; each of
these under the plain policy, uniform 16 and 4 levels, and random policies. One profile of bytes predicts all
policies. Then each policy runs three steps in a process of its own. Meter one counts live storages after
every operator. Meter two reads the growth of the process from before the model was built: it also sees
workspaces, and memory that no tensor owns.

What is hard: there are hundreds of steps. So the processes of one model are forks of one that has imported
everything and computed nothing; and every measured step is one line with a hash of the code, so that a
second run repeats only what has no line of the same code. The page says of which code each row is.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import append, code_of, json_lines
from meters import resident, trim
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from truth_page import METERS, deviation, write
from truth_subjects import SUBJECTS

import mesa_tune as mt
from mesa_tune.measure import tracing
from mesa_tune.policy.settings import EXACT, LayerSettings

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "truth"
RESULTS = BUILD / "results.jsonl"
UNITS = ROOT / "benchmarks" / "results" / "truth.jsonl"
RANDOM = 10
CODECS: list[dict[str, Any]] = [
    *[{"store": "quantize"}] * 4,
    *[{"store": "derive"}] * 2,
    {"rows": 0.5},
    {"rows": 0.1},
    {"store": "levels"},
    {"drop": 0.6},
    {"drop": 0.9},
    {"ema_decay": 0.9},
    {"allocation": "sample"},
    {"group_size": None, "quant_groups": 4},
]
"""How a layer of a random policy stores, each as likely as the others."""
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulation": 4},
    "checkpointed": {},
    "autocast": {"autocast": "bfloat16"},
}


def workload(name: str, variant: str) -> mt.Workload:
    """Return the model `name` with a step of `variant`."""
    subject = SUBJECTS[name]

    def build() -> nn.Module:
        model = subject.build()
        if variant == "checkpointed":
            for block in _blocks(model, subject.blocks):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        return model

    # Smaller batches where a step has four of them.
    size = max(2, subject.batch_size // 2) if variant == "accumulated" else subject.batch_size
    return mt.Workload(build, subject.batch, subject.loss, batch_size=size, device="cpu", **VARIANTS[variant])


def _blocks(model: nn.Module, path: str) -> list[nn.Module]:
    return list(model.get_submodule(path).children())


def random_policy(profile: mt.Profile, seed: int) -> mt.Policy:
    """Return a policy that gives each layer settings drawn at random."""
    draw = random.Random(seed)

    def settings() -> LayerSettings:
        if draw.random() < 0.2:
            return EXACT
        codec, size = draw.choice(CODECS), draw.choice((64, 256, 1024))
        level = 2 ** draw.randint(1, 4 if codec.get("store") == "levels" else 8)
        return LayerSettings(level=level, **{"group_size": size, **codec})

    return mt.Policy.from_assignments(
        (layer.tag, layer.index, layer.name, settings()) for layer in profile.layers
    )


def policies(profile: mt.Profile, count: int) -> dict[str, mt.Policy]:
    """Return the policies under which a step is predicted and measured, by name."""
    return {
        "plain": mt.Policy.parse(""),
        "uniform 16": mt.Policy.uniform(level=16),
        "uniform 4": mt.Policy.uniform(level=4),
        **{f"random {number}": random_policy(profile, number) for number in range(count)},
    }


class LiveStorages(TorchDispatchMode):
    """Bytes of all storages seen since the mode was entered: `alive` now, and the most, `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.alive = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see_all((args, kwargs, result))
        self.peak = max(self.peak, self.alive)
        return result

    def see_all(self, tree: Any) -> None:
        """Count the storages of all tensors in `tree`."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor):
                self.see(leaf)

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self.seen:
            self.seen[key] = weakref.ref(storage, lambda _: self.forget(key)), 0
        reference, before = self.seen[key]
        self.seen[key] = reference, size
        self.alive += size - before

    def forget(self, key: int) -> None:
        self.alive -= self.seen.pop(key)[1]


class Training:
    """A model in training under a policy, with a plain loop of its own."""

    def __init__(self, chosen: mt.Workload, policy: mt.Policy | None) -> None:
        self.workload, self.policy = chosen, policy
        torch.manual_seed(0)
        self.model = chosen.model().train()
        if policy is not None:
            mt.convert(self.model, policy, seed=0)
        self.batch = chosen.batch(chosen.batch_size)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, after_forward: Callable[[Tensor], None] = lambda loss: None) -> None:
        """Run one step; `after_forward` is called with the loss before the last backward."""
        self.optimizer.zero_grad()
        for number in range(self.workload.accumulation):
            loss = self._loss()
            if number == self.workload.accumulation - 1:
                after_forward(loss)
            (loss / self.workload.accumulation).backward()
            del loss
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        """Return weights, buffers, batch and the optimizer's state."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        leaves = [*self.model.parameters(), *self.model.buffers(), *tree_leaves(self.batch), *state]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _loss(self) -> Tensor:
        assert self.workload.loss is not None
        compressing = nullcontext() if self.policy is None else mt.compress_saved(self.policy, seed=0)
        with torch.autocast("cpu", enabled=self.workload.autocast is not None), compressing:
            return self.workload.loss(self.model, self.batch)


def measure(chosen: mt.Workload, policy: mt.Policy | None) -> dict[str, int]:
    """Return the bytes of the second step: growth of the process, live storages at the peak, and saved."""
    # A step with one sample first: modules are imported, and libraries allocate what they allocate once.
    Training(replace(chosen, batch_size=1), policy).step()
    gc.collect()
    trim()
    before = resident("VmRSS")
    training = Training(chosen, policy)
    training.step()
    trim()
    Path("/proc/self/clear_refs").write_text("5")
    training.step()
    growth = resident("VmHWM") - before
    return {"resident": growth, **_live(training)}


def _live(training: Training) -> dict[str, int]:
    saved: list[int] = []
    with LiveStorages() as storages:
        training.optimizer.zero_grad()
        storages.see_all(training.tensors())
        training.step(lambda loss: saved.append(storages.alive - loss.untyped_storage().nbytes()))
    return {"peak": storages.peak, "saved": saved[0] - _static(training)}


def _static(training: Training) -> int:
    """Return the bytes of what is alive when the last forward begins."""
    tensors = training.tensors()
    if training.workload.accumulation > 1:
        tensors += [weight.grad for weight in training.model.parameters() if weight.grad is not None]
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def code() -> str:
    """Return a hash of the sources that predictions and steps depend on."""
    folders = (
        "ops",
        "policy",
        "codecs",
        "engine",
        "formulas",
        "conversion",
        "workload",
        "profiles",
        "measure",
    )
    return code_of(folders, Path(__file__))


def done(version: str) -> set[tuple[str, str, str]]:
    """Return model, variant and policy of the lines of this code."""
    measured = [(row["model"], row["variant"], row["policies"]) for row in units() if row["code"] == version]
    found = {(model, variant, policy) for model, variant, policies in measured for policy in policies}
    return found | {key(line) for line in lines() if line["code"] == version}


def key(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["model"], line["variant"], line["policy"]


def units() -> list[dict[str, Any]]:
    """Return the units of models and variants in `results/truth.jsonl`, oldest first."""
    return json_lines(UNITS)


def fresh_units() -> list[dict[str, Any]]:
    """Return units made of the lines, where they have policies that the recorded unit of this code lacks."""
    made: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in lines():
        unit = made.setdefault((line["model"], line["variant"], line["code"]), {})
        unit[line["policy"]] = {
            name: line[name] for name in ("predicted", "measured", "error") if name in line
        }
    recorded = {(row["model"], row["variant"], row["code"]): row["policies"] for row in units()}
    return [
        {"model": model, "variant": variant, "code": version, "policies": policies}
        for (model, variant, version), policies in made.items()
        if not policies.keys() <= recorded.get((model, variant, version), {}).keys()
    ]


def lines() -> list[dict[str, Any]]:
    return json_lines(RESULTS)


def run_unit(name: str, variant: str, version: str, count: int) -> None:
    """Profile one variant of a model and measure each policy, in a process that reports line by line."""
    finished = done(version)
    labels = ["plain", "uniform 16", "uniform 4", *(f"random {number}" for number in range(count))]
    missing = [label for label in labels if (name, variant, label) not in finished]
    if not missing:
        return
    unit = [sys.executable, "-W", "ignore", __file__, "--models", name, "--variants", variant]
    command = [*unit, "--random", str(count), "--measure", ",".join(missing)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            row = {"code": version, "model": name, "variant": variant, **json.loads(line)}
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(describe(row), flush=True)


def report_unit(name: str, variant: str, count: int, labels: Sequence[str]) -> None:
    """Print a line of JSON for each policy of `labels`: predicted and measured bytes, or the error."""
    import_libraries(name)
    chosen = workload(name, variant)
    folder = BUILD / f"{name}-{variant}"
    folder.mkdir(parents=True, exist_ok=True)
    predicted = in_fork(lambda: predict(chosen, count, folder))
    for label in labels:
        row: dict[str, Any] = {"policy": label}
        if "error" not in predicted:
            policy = None if label == "plain" else mt.Policy.load(folder / f"{label}.txt")
            measured = in_fork(partial(measure, chosen, policy))
            row |= {"predicted": predicted[label], "measured": measured}
            row |= {"error": measured["error"]} if "error" in measured else {}
        else:
            row |= predicted
        print(json.dumps(row), flush=True)


def import_libraries(name: str) -> None:
    """Import what the model needs without computing anything: a fork must not inherit memory to use again."""
    with torch.device("meta"):
        SUBJECTS[name].build()


def in_fork(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `compute()` in a fork of this process, or the last line of its error."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        with os.fdopen(writer, "w") as pipe:
            try:
                json.dump(compute(), pipe)
            except Exception as error:  # noqa: BLE001 (whatever a model raises belongs to the results)
                json.dump({"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(process, 0)
    found: dict[str, Any] = json.loads(text) if text else {"error": "killed"}
    return found


def describe(row: dict[str, Any]) -> str:
    """Return a line of text about one measured step."""
    head = f"{row['model']:<13} {row['variant']:<13} {row['policy']:<11}"
    if "error" in row:
        return f"{head} {row['error']}"
    shares = [f"{meter} {deviation(row, meter):+.2%}" for meter in METERS]
    return f"{head} {row['measured']['peak'] / 1e6:7.1f} MB  {'  '.join(shares)}"


def predict(chosen: mt.Workload, count: int, folder: Path) -> dict[str, Any]:
    """Return the predicted bytes of every policy, and save the policies in `folder`."""
    tracing.block_levels = lambda model, plain: iter(())  # no policy here runs a block again: trace none
    profile = mt.profile(chosen, options=[])
    result = {}
    for label, policy in policies(profile, count).items():
        policy.save(folder / f"{label}.txt", force=True)
        prediction = profile.predict(policy)
        result[label] = {
            "saved": prediction.saved_bytes,
            "peak": mt.estimate(chosen, policy).tensor_bytes,
            "resident": prediction.peak_bytes + (prediction.library_bytes or 0),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(SUBJECTS), help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--random", type=int, default=RANDOM, help="how many random policies")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--docs", action="store_true", help="write docs/truth.md from the results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names, variants = arguments.models.split(","), arguments.variants.split(",")
    if arguments.docs:
        for unit in fresh_units():
            append("truth", unit)
        print(f"wrote {write(units(), code())}")
    elif arguments.measure is not None:
        report_unit(names[0], variants[0], arguments.random, arguments.measure.split(","))
    else:
        BUILD.mkdir(parents=True, exist_ok=True)
        version = code()
        with ThreadPoolExecutor(arguments.jobs) as pool:
            waiting = [
                pool.submit(run_unit, name, variant, version, arguments.random)
                for name, variant in itertools.product(names, variants)
            ]
            for unit in waiting:
                unit.result()


if __name__ == "__main__":
    main()
