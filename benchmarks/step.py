"""How much longer does a training step take, and what does it save, in comparison with other methods?

    python benchmarks/step.py [--models deit_ti,resnet_50,gpt2] [--rounds 9] [--where]
    python benchmarks/step.py --docs          # writes docs/steps.md from the latest results

The kinds are uniform 4 bits (level 16), the same with exact attention, `torch.utils.checkpoint` around every
block, `save_on_cpu`, and plain PyTorch. Each round runs one step of each kind; its time is divided by that of
the plain step of the same round. Before timing, every kind's loss must be bitwise the plain one. Peak and
saved bytes are those of live storages. `--where` lists the operations that take the time which a policy adds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import append, in_turn, ratios, spread
from meters import loss_under
from steps_page import write
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import ZOO, workload

import mesa_tune as mt
from mesa_tune.measure.memory.meter import StepMemory, measure_step

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MAX_OPERATIONS = 12


class Subject(NamedTuple):
    """A workload, the class name of its blocks, and the largest acceptable time of `uniform 16`."""

    title: str
    workload: Callable[[], mt.Workload]
    block: str
    asked: float


def deit_ti() -> mt.Workload:
    """Return the example's DeiT-Ti, for images of 224 × 224."""
    return mt.Workload.load(EXAMPLES / "deit_tiny.py", batch_size=32, device="cpu")


def gpt2() -> mt.Workload:
    """Return GPT-2 of 4 layers, with 4 texts of 512 tokens."""
    import transformers

    def build() -> nn.Module:
        made: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4, use_cache=False))
        return made

    def batch(size: int) -> dict[str, Tensor]:
        ids = torch.randint(100, 30_000, (size, 512))
        return {"input_ids": ids, "labels": ids.clone()}

    return mt.Workload(build, batch, ZOO["gpt2"].loss, batch_size=4)


SUBJECTS: dict[str, Subject] = {
    "deit_ti": Subject("DeiT-Ti, batch 32", deit_ti, "DeiTLayer", 1.12),
    "resnet_50": Subject(
        "ResNet-50, batch 16", partial(workload, "resnet_50", 16), "ResNetBottleNeckLayer", 1.15
    ),
    "gpt2": Subject("GPT-2 of 4 layers, batch 4 × 512", gpt2, "GPT2Block", 1.12),
}


class Kind(NamedTuple):
    """A method: a policy, or a change of the plain model, or a context around its forward."""

    policy: mt.Policy | None = None
    change: Callable[[nn.Module, str], None] | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def attention_exact() -> mt.Policy:
    """Return uniform 16 with exact attention."""
    before, _, after = mt.Policy.uniform(level=16).dumps().partition("on attention:")
    return mt.Policy.parse(f"{before}on attention:{after.replace('enable: True', 'enable: False', 1)}")


def checkpoint_blocks(model: nn.Module, block: str, count: int | None = None, **options: Any) -> None:
    """Checkpoint the first `count` modules of the class named `block`, or all: they run again in backward."""
    blocks = [module for module in model.modules() if type(module).__name__ == block]
    for module in blocks[:count]:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, **options)  # type: ignore[method-assign]


KINDS: dict[str, Kind] = {
    "plain": Kind(),
    "uniform 16": Kind(mt.Policy.uniform(level=16)),
    "uniform 16, attention exact": Kind(attention_exact()),
    "checkpoint per block": Kind(change=checkpoint_blocks),
    "save_on_cpu": Kind(around=torch.autograd.graph.save_on_cpu),
}


class Stepper:
    """A model with its optimizer, batch and loss, for steps of one kind."""

    def __init__(self, subject: Subject, kind: Kind) -> None:
        workload = subject.workload()
        self.model = workload.build()
        if kind.policy is not None:
            mt.convert(self.model, kind.policy, seed=0)
        if kind.change is not None:
            kind.change(self.model, subject.block)
        self.batch = workload.make_batch()
        self.optimizer = workload.make_optimizer(self.model)
        self.loss = loss_under(workload, kind.policy)
        self.around = kind.around

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss, computed with the same random numbers for every kind."""
        torch.manual_seed(0)
        with self.around():
            return self.loss(model, batch)

    def step(self) -> float:
        """Run a whole step; return its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def bytes(self) -> StepMemory:
        """Return saved and peak bytes of a step."""
        return measure_step(self.model, self.batch, self.forward, self.optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(SUBJECTS), help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument(
        "--kinds", default=";".join(KINDS), help="separated by semicolons; plain is always measured"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--where", action="store_true", help="which operations take the added time")
    parser.add_argument("--docs", action="store_true", help="write docs/steps.md from the latest results")
    arguments = parser.parse_args()
    if arguments.docs:
        print(f"wrote {write()}")
        return
    kinds = {name: KINDS[name] for name in KINDS if name in ("plain", *arguments.kinds.split(";"))}
    for name in arguments.models.split(","):
        subject = SUBJECTS[name]
        print(f"\n{subject.title}", flush=True)
        rows = measure(subject, kinds, arguments.rounds)
        for kind, row in rows.items():
            print(describe(kind, row, subject.asked), flush=True)
        added = where(subject) if arguments.where else None
        print(added or "")
        if len(kinds) == len(KINDS):
            result = {"subject": subject.title, "asked": subject.asked, "rows": rows, "where": added}
            append("step", result)


def measure(subject: Subject, kinds: Mapping[str, Kind], rounds: int) -> dict[str, dict[str, Any]]:
    """Measure step times, in turn, and bytes of all kinds."""
    steppers = {name: Stepper(subject, kind) for name, kind in kinds.items()}
    losses = {name: stepper.step() for name, stepper in steppers.items()}
    if len(set(losses.values())) != 1:
        raise SystemExit(f"the forward is not exact: losses {losses}")
    times = in_turn({name: stepper.step for name, stepper in steppers.items()}, rounds)
    return {name: row(times["plain"], times[name], stepper.bytes()) for name, stepper in steppers.items()}


def row(plain: list[float], own: list[float], memory: StepMemory) -> dict[str, Any]:
    """Return the figures of one kind."""
    return {
        "step_ms": spread(own)._asdict(),
        "step_ratio": ratios(plain, own)._asdict(),
        "saved_bytes": memory.saved_bytes,
        "peak_bytes": memory.peak_bytes,
    }


def describe(kind: str, row: Mapping[str, Any], asked: float) -> str:
    """Return one kind's figures as a line."""
    ratio = row["step_ratio"]
    bound = f", asked {asked}" if kind == "uniform 16" else ""
    return (
        f"  {kind:28} {row['step_ms']['median']:7.0f} ms  {ratio['median']:.3f} times plain "
        f"[{ratio['low']:.3f}, {ratio['high']:.3f}]{bound}; saved {row['saved_bytes'] / 1e6:.0f} MB, "
        f"peak {row['peak_bytes'] / 1e6:.0f} MB"
    )


def where(subject: Subject) -> str:
    """List by how many milliseconds per step each operation takes longer under uniform 16 than plain."""
    plain, policy = (operations(Stepper(subject, KINDS[name])) for name in ("plain", "uniform 16"))
    added = {name: policy.get(name, 0.0) - plain.get(name, 0.0) for name in {*plain, *policy}}
    lines = [f"  of {sum(plain.values()):.0f} ms plain, {sum(added.values()):+.0f} ms:"]
    lines += [
        f"    {added[name]:+8.1f}  {name} ({plain.get(name, 0):.1f} -> {policy.get(name, 0):.1f})"
        for name in sorted(added, key=lambda name: -abs(added[name]))[:MAX_OPERATIONS]
    ]
    return "\n".join(lines)


def operations(stepper: Stepper, steps: int = 3) -> dict[str, float]:
    """Return milliseconds per step by operation, without the operations that it calls."""
    stepper.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            stepper.step()
    return {event.key: event.self_cpu_time_total / 1e3 / steps for event in profiler.key_averages()}


if __name__ == "__main__":
    main()
