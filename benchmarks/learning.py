"""Does training within the noise ratio learn as well as plain training? Two models, several seeds, paired.

    python benchmarks/learning.py [--tasks digits,gpt] [--seeds 5] [--ratio 0.1]

`digits`: the example's vision transformer on handwritten digits, by test accuracy. `gpt`: a small GPT on the
bytes of Python's standard library, by the loss in nats per byte on files that it was not trained on. Each is
trained plainly, under the policies that a search finds in the untrained model (objective `time` at 40 % of
the plain peak, and `--smallest`), and under uniform 2 bits. A seed determines initialization and batches,
equally under every policy, so differences to plain are paired: their mean has a 95 % interval by Student's
t. The noise ratio under each policy is measured in the untrained model and in a trained one. Trainings of
this command that are recorded are not repeated.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from accuracy import EXAMPLE, load_example
from common import RESULTS, append, json_lines, mean_interval
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.profiler.errors.joint_error import JointError

LENGTH, BATCH, STEPS, RATE = 64, 16, 240, 4e-3
"""Of the GPT: bytes of a text, texts of a batch, steps, learning rate."""
BUDGET = "40%"
PAIRS = [(draw, seed) for draw in range(8) for seed in range(2)]
POLICIES = ("plain", "time", "smallest", "uniform 2 bits")


class Task(NamedTuple):
    """A model to train. `score`: of a trained model; `unit`: what an acceptable difference is of."""

    workload: mt.Workload
    batch: Callable[[int], Any]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    steps: int
    rate: float
    score: Callable[[nn.Module], float]


def digits() -> Task:
    """Return the example's vision transformer."""
    example = load_example()
    workload = mt.Workload.load(EXAMPLE, device="cpu")
    return Task(
        workload, example.batch, example.optimizer, example.STEPS, example.LEARNING_RATE, example.accuracy
    )


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Return the bytes of the standard library's modules, for training and, of each tenth, for validation."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [
        b"".join(file.read_bytes() for number, file in enumerate(files) if (number % 10 == 9) is held_out)
        for held_out in (False, True)
    ]
    train, test = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts)
    return train, test


def gpt() -> Task:
    """Return a GPT of 3 layers and 96 channels."""

    def build() -> nn.Module:
        sizes: dict[str, Any] = {"n_layer": 3, "n_embd": 96, "n_head": 4, "n_positions": LENGTH}
        words: dict[str, Any] = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
        made: nn.Module = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**sizes, **words, use_cache=False)
        )
        return made

    def windows(text: Tensor, starts: Tensor) -> dict[str, Tensor]:
        ids = text[starts[:, None] + torch.arange(LENGTH)]
        return {"input_ids": ids, "labels": ids}

    def batch(size: int) -> dict[str, Tensor]:
        text = texts()[0]
        return windows(text, torch.randint(len(text) - LENGTH, (size,)))

    @torch.no_grad()
    def score(model: nn.Module) -> float:
        text = texts()[1]
        starts = torch.linspace(0, len(text) - LENGTH - 1, 512).long()
        model.eval()
        return statistics.fmean(model(**windows(text, part)).loss.item() for part in starts.split(64))

    optimizer = partial(torch.optim.AdamW, lr=RATE, fused=True)
    loss: Callable[..., Tensor] = lambda model, batch: model(**batch).loss  # noqa: E731
    workload = mt.Workload(build, batch, loss, optimizer=optimizer, batch_size=BATCH)
    return Task(workload, batch, optimizer, STEPS, RATE, score)


TASKS = {"digits": digits, "gpt": gpt}


def trained(task: Task, policy: mt.Policy | None, seed: int) -> nn.Module:
    """Return a model trained under the policy, as a user would."""
    torch.manual_seed(seed)
    workload = task.workload
    model = workload.model()
    if policy is not None:
        mt.convert(model, policy, seed=seed)
    optimizer = task.optimizer(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, task.rate, total_steps=task.steps, pct_start=0.1
    )
    model.train()
    for _ in range(task.steps):
        samples = task.batch(workload.batch_size)
        with mt.compress_saved(policy or mt.Policy(())):
            loss = workload.compute_loss(model, samples)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    mt.revert(model)
    return model


def searched(task: Task, ratio: float) -> dict[str, tuple[mt.Policy | None, dict[str, Any]]]:
    """Return each policy with its predicted peak over the plain one, step and noise ratio."""
    profile = mt.profile(task.workload)
    options: dict[str, Any] = {"max_noise_ratio": ratio, "trials": 0}
    plans = {
        "time": mt.search_policy(profile, BUDGET, objective="time", **options),
        "smallest": mt.search_policy(profile, objective="memory", **options),
    }
    policies = {name: plan.policy for name, plan in plans.items()}
    policies["uniform 2 bits"] = mt.Policy.uniform(level=4)
    found: dict[str, tuple[mt.Policy | None, dict[str, Any]]] = {"plain": (None, {})}
    for name, policy in policies.items():
        predicted = profile.predict(policy)
        peak = predicted.peak_bytes / profile.peak_bytes
        saved = predicted.saved_bytes / profile.saved_bytes
        found[name] = (
            policy,
            {"peak": peak, "saved": saved, "noise_ratio": predicted.gradient_noise_ratio},
        )
    return found


def noise_ratio(joint: JointError, policy: mt.Policy) -> float:
    """Return the mean joint error over the batches' noise."""
    return statistics.fmean(joint.errors(policy, PAIRS)) / joint.noise().relative


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each kind (at least 2)")
    parser.add_argument("--ratio", type=float, default=0.1, help="limit on the noise ratio of the searches")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2: one training has no spread")
    for name in arguments.tasks.split(","):
        run(name, arguments.ratio, arguments.seeds)
        for line in described(name, arguments.ratio):
            print(line)


def run(name: str, ratio: float, seeds: int) -> None:
    """Train what is not recorded yet, and record it."""
    task = TASKS[name]()
    key = {"task": name, "ratio": ratio}
    done = {(row["policy"], row["seed"]) for row in recorded(name, ratio)}
    found = searched(task, ratio)
    for seed in range(seeds):
        for label in POLICIES:
            policy, predicted = found[label]
            if (label, seed) in done:
                continue
            model = trained(task, policy, seed)
            result = {**key, "policy": label, "seed": seed, "score": task.score(model), **predicted}
            if policy is not None and not seed:
                model.train()
                result["measured"] = {
                    "untrained": noise_ratio(JointError(task.workload), policy),
                    "trained": noise_ratio(JointError(task.workload, model), policy),
                }
            append("learning", result)
            print(f"{name}, seed {seed}: {label} {result['score']:.4f}", flush=True)


def recorded(name: str, ratio: float) -> list[dict[str, Any]]:
    """Return the recorded trainings of a task."""
    rows = json_lines(RESULTS / "learning.jsonl")
    return [row for row in rows if (row["task"], row["ratio"]) == (name, ratio)]


def described(name: str, ratio: float) -> list[str]:
    """Return a table: score, paired difference to plain with its 95 % interval, bytes and noise ratios."""
    rows = recorded(name, ratio)
    scores: dict[str, dict[int, float]] = {label: {} for label in POLICIES}
    for row in rows:
        scores[row["policy"]][row["seed"]] = row["score"]
    plain = scores["plain"]
    lines = [f"{name}, noise ratio {ratio:g}; {'accuracy' if name == 'digits' else 'loss in nats per byte'}"]
    for label, of_seed in scores.items():
        lines.append(f"  {label:15} {statistics.fmean(of_seed.values()):.4f} ({len(of_seed)} seeds)")
        if label != "plain":
            first = next(row for row in rows if row["policy"] == label and "measured" in row)
            low, mean, high = interval([score - plain[seed] for seed, score in of_seed.items()])
            untrained, after = (first["measured"][when] for when in ("untrained", "trained"))
            lines.append(
                f"    to plain {mean:+.4f} [{low:+.4f}, {high:+.4f}]; "
                f"peak {first['peak']:.0%}, saved {first['saved']:.1%}; noise ratio "
                f"{_shown(first['noise_ratio'])} predicted, {untrained:.2g} untrained, {after:.2g} trained"
            )
    return lines


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower end, the mean and the upper end of the 95 % interval."""
    found = mean_interval(differences)
    return found.low, found.mean, found.high


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


if __name__ == "__main__":
    main()
