"""How well does a profile predict the time of a training step under a policy?

    python benchmarks/step_time.py [--models digits_vit,gpt2,resnet] [--rounds 15] [--work 0,1] [--fast]

Each model is profiled, then 20 policies are predicted and measured: uniform and random ones, most with some
layers exact. Each is measured beside plain steps, in turn: the median of the ratios of `--rounds` pairs of
steps, on the wall clock and in processor time. There are two models, because of twenty, only the plain one
would find its weights in the cache. `--work N` does all of this beside N other processes
that multiply matrices. Errors are predicted minus measured ratios; `noise` is the standard error of a
measured ratio. The same policy takes up to 0.03 of a step more or less in other models of the same weights,
which lie elsewhere in memory: so a policy is measured in `PLACES` pairs of models. Meanwhile no freed memory
goes back to the system: else a plain step gets back page by page what one that compresses has returned.
Before timing, the loss under each policy must be bitwise the plain one.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from common import append, ratios, spread
from meters import loss_under
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.measure.timing.heap import steady_heap
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.entries import fast_grid, full_grid
from mesa_tune.profiles.profile import Profile

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
POLICIES, PLACES = 20, 3
WORK = "import torch; torch.set_num_threads(1); a = torch.randn(512, 512)\nwhile True: a = (a @ a).tanh()"


def digits_vit() -> mt.Workload:
    """Return the example's vision transformer."""
    return mt.Workload.load(EXAMPLES / "digits_vit.py", device="cpu")


def gpt2() -> mt.Workload:
    """Return a GPT-2 of 4 layers and 128 channels, with 8 texts of 128 tokens."""

    def build() -> nn.Module:
        sizes: dict[str, Any] = {
            "n_layer": 4,
            "n_embd": 128,
            "n_head": 4,
            "n_positions": 128,
            "vocab_size": 1000,
        }
        tokens: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
        made: nn.Module = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**sizes, **tokens, use_cache=False)
        )
        return made

    def batch(size: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 1000, (size, 128))
        return {"input_ids": ids, "labels": ids.clone()}

    return mt.Workload(build, batch, lambda model, batch: model(**batch).loss, batch_size=8)


def resnet() -> mt.Workload:
    """Return a ResNet of 8 basic blocks and 16 to 128 channels, with 16 images of 64 × 64."""

    def build() -> nn.Module:
        sizes: dict[str, Any] = {
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 64, 128],
            "depths": [2, 2, 2, 2],
            "num_labels": 10,
        }
        made: nn.Module = transformers.ResNetForImageClassification(
            transformers.ResNetConfig(**sizes, layer_type="basic")
        )
        return made

    def batch(size: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(size, 3, 64, 64), "labels": torch.randint(0, 10, (size,))}

    return mt.Workload(build, batch, lambda model, batch: model(**batch).loss, batch_size=16)


SUBJECTS: dict[str, Callable[[], mt.Workload]] = {"digits_vit": digits_vit, "gpt2": gpt2, "resnet": resnet}


class Candidate(NamedTuple):
    """A policy with a label for the table."""

    label: str
    policy: mt.Policy


def candidates(profile: Profile, options: Sequence[LayerSettings]) -> Iterator[Candidate]:
    """Yield uniform and random policies in turn, with 0 to 90 % of the layers exact."""
    rng = random.Random(0)
    for number in range(POLICIES):
        share, uniform = 0.9 * (number // 2) / (POLICIES // 2 - 1), number % 2 == 0
        one = rng.choice(options)
        chosen = {
            layer.name: EXACT if rng.random() < share else one if uniform else rng.choice(options)
            for layer in profile.layers
        }
        rows = ((layer.tag, layer.index, layer.name, chosen[layer.name]) for layer in profile.layers)
        kind = f"uniform {one.label}" if uniform else "random"
        yield Candidate(f"{kind}, {share:.0%} exact", mt.Policy.from_assignments(rows))


class Training:
    """A model with its optimizer, batch and loss under one policy (None: plain)."""

    def __init__(self, workload: mt.Workload, policy: mt.Policy | None) -> None:
        self.workload, self.model = workload, workload.build()
        self.batch = workload.make_batch()
        if policy is not None:
            mt.convert(self.model, policy, seed=0)
        self.optimizer = workload.make_optimizer(self.model)
        self.loss = loss_under(workload, policy)

    def step(self) -> float:
        """Run a whole step; return its loss."""
        torch.manual_seed(0)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()


class Times(NamedTuple):
    """Milliseconds of a step: on the wall clock, and of this thread's processor time."""

    wall: float
    processor: float


def timed(step: Callable[[], object]) -> Times:
    """Run `step` and return its times."""
    wall, processor = time.perf_counter(), time.thread_time()
    step()
    return Times(1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - processor))


Pairs = list[tuple[Times, Times]]
"""Times of a plain step and of one under a policy."""


@steady_heap()
def measure(workload: mt.Workload, candidates: Sequence[Candidate], rounds: int) -> list[Pairs]:
    """Return for each candidate pairs of times, after three steps, of models in several places."""
    found: list[Pairs] = []
    for candidate in candidates:
        models = [(Training(workload, None), Training(workload, candidate.policy)) for _ in range(PLACES)]
        found.append([])
        for plain, packed in models:
            first, *_ = [plain.step() for _ in range(3)]  # in these steps the calls are planned
            loss, *_ = [packed.step() for _ in range(3)]
            if loss != first:
                raise SystemExit(f"{candidate.label}: the forward is not exact: losses {first}, {loss}")
            found[-1] += [(timed(plain.step), timed(packed.step)) for _ in range(-(-rounds // PLACES))]
    return found


def row(candidate: Candidate, profile: Profile, pairs: Pairs) -> dict[str, Any]:
    """Return the predicted and the measured ratio of one policy."""
    predicted = profile.predict(candidate.policy).step_ms
    by_clock = {
        clock: ratios([getattr(a, clock) for a, _ in pairs], [getattr(b, clock) for _, b in pairs])
        for clock in Times._fields
    }
    return {
        "policy": candidate.label,
        "predicted": None if predicted is None else predicted / profile.plain_ms(profile.batch_size),
        **{clock: found._asdict() for clock, found in by_clock.items()},
        # Of the median, from the quartiles of a normal distribution.
        "noise": {c: 0.93 * (found.high - found.low) / len(pairs) ** 0.5 for c, found in by_clock.items()},
    }


def summary(rows: Sequence[dict[str, Any]], clock: str) -> dict[str, float]:
    """Return the errors of the predicted ratios and the rank correlation with the measured ones."""
    from scipy import stats

    predicted, measured = [row["predicted"] for row in rows], [row[clock]["median"] for row in rows]
    errors = [first - second for first, second in zip(predicted, measured, strict=True)]
    sizes = [abs(error) for error in errors]
    return {
        "median_error": spread(sizes).median,
        "largest_error": max(sizes),
        "mean_difference": sum(errors) / len(errors),
        "rank_correlation": float(stats.spearmanr(predicted, measured).statistic),
        "noise": spread([row["noise"][clock] for row in rows]).median,
    }


@contextmanager
def beside(processes: int) -> Iterator[None]:
    """Run the body beside this many processes that multiply matrices."""
    others = [subprocess.Popen([sys.executable, "-c", WORK]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(SUBJECTS), help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of steps per policy")
    parser.add_argument("--work", default="0,1", help="numbers of other processes at work")
    parser.add_argument("--fast", action="store_true", help="profile as `mesa-tune profile --fast` does")
    arguments = parser.parse_args()
    options, seeds = (fast_grid(), 1) if arguments.fast else (full_grid(), 2)
    for name in arguments.models.split(","):
        for processes in map(int, arguments.work.split(",")):
            with beside(processes):
                result = run(SUBJECTS[name](), options, seeds, arguments.rounds)
            load = os.getloadavg()[0]
            print(f"\n{name}, {processes} other processes at work; load average {load:.1f}")
            print(describe(result), flush=True)
            append("step_time", {"subject": name, "work": processes, "load": load, **result})


def run(workload: mt.Workload, options: list[LayerSettings], seeds: int, rounds: int) -> dict[str, Any]:
    """Profile, predict and measure one workload."""
    start = time.perf_counter()
    profile = mt.profile(workload, options=options, seeds=seeds)
    profile_s = time.perf_counter() - start
    policies = list(candidates(profile, full_grid()))
    found = measure(workload, policies, rounds)
    rows = [row(policy, profile, pairs) for policy, pairs in zip(policies, found, strict=True)]
    summaries = {clock: summary(rows, clock) for clock in Times._fields}
    times = {"step_ms": profile.step_ms, "routing_ms": profile.routing_ms, "profile_s": profile_s}
    return {"options": len(options), "seeds": seeds, "rounds": rounds, **times, **summaries, "rows": rows}


def describe(result: dict[str, Any]) -> str:
    """Return the result as a table."""
    lines = [f"  {'policy':44} predicted  measured (wall, quartiles)   processor time"]
    for row in result["rows"]:
        wall, processor = row["wall"], row["processor"]["median"]
        measured = f"{wall['median']:8.3f} [{wall['low']:.3f}, {wall['high']:.3f}]  {processor:8.3f}"
        lines += [f"  {row['policy']:44} {row['predicted']:9.3f}  {measured}"]
    for clock in Times._fields:
        lines.append(f"  {clock}: " + ", ".join(f"{key} {value:.3f}" for key, value in result[clock].items()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
