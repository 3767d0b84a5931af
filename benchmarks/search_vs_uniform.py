"""How much lower is the gradient error of a searched policy than that of a rival, at the rival's bytes?

    python benchmarks/search_vs_uniform.py [--tasks digits,text] [--seeds 5] [--trials 100] [--batches 8]

The models are the digits ViT, trained to convergence, and the GPT of learning.py after its training.
Rivals, at 4, 3 and 2 bits: uniform bits; uniform with the loss and the classifier exact; by layer within the
bytes of uniform ones, reduced where an error per byte is least, by measured errors (GACT) or by the law of
quantization noise (ActNN). The search gets a rival's peak and saved bytes as limits, and is solved without a
study. The errors of both are then computed by the code of this file, on batches and rounding seeds that the
search has not seen. `--seeds`: at the bytes of uniform bits, so many studies, and what they gain. The bytes
of both policies are measured before any error.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from common import append, mean_interval
from greedy import greedy
from learning import with_weights
from learning_tasks import TASKS, train
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.measure.memory.meter import measure_step
from mesa_tune.policy.settings import EXACT, LayerSettings

PROMISED = {"digits": {4: 100.0, 3: 60.0, 2: 30.0}, "text": dict.fromkeys((4, 3, 2), 5.0)}
"""How many times lower than uniform bits'."""
UNIFORM = "uniform"
STEPS, UNSEEN = {"digits": 600}, 50_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default="digits,text")
    parser.add_argument("--seeds", type=int, default=0, help="studies of each kind (none, or at least 2)")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=None, help="seconds per study")
    parser.add_argument("--batches", type=int, default=8, help="unseen batches for the gradient errors")
    arguments = parser.parse_args()
    for task in arguments.tasks.split(","):
        workload = trained_workload(task, STEPS.get(task))
        profile = mt.profile(workload, seeds=4)
        unseen = GradientError(workload, unseen_batches(workload, arguments.batches))
        for bits in (4, 3, 2):
            for rival, policy in rivals(profile, bits):
                result = compare(workload, profile, unseen, policy)
                if rival == UNIFORM:
                    result["promised"] = PROMISED[task][bits]
                    result |= studied(workload, profile, unseen, result, policy, arguments)
                print(describe(f"{task}, {rival}, {bits} bits", result), flush=True)
                append("search_vs_uniform", {"task": task, "rival": rival, "bits": bits, **result})


def rivals(profile: mt.Profile, bits: int) -> Iterator[tuple[str, mt.Policy]]:
    """Yield the rivals at so many bits."""
    uniform, settings = mt.Policy.uniform(level=2**bits), LayerSettings(level=2**bits)
    yield UNIFORM, uniform
    classifier = [layer.name for layer in profile.layers if layer.tag == "fc"][-1]
    exact = {classifier, *(layer.name for layer in profile.layers if layer.name.startswith("loss"))}
    rules = (
        (one.tag, one.index, one.name, EXACT if one.name in exact else settings) for one in profile.layers
    )
    yield "loss and classifier exact", mt.Policy.from_assignments(rules)
    limit = profile.predict(uniform).saved_bytes
    for law, name in ((False, "greedy by errors"), (True, "greedy by the law of noise")):
        policy = greedy(profile, lambda each: profile.predict(each).saved_bytes, limit, law=law)
        if policy is not None:
            yield name, policy


def trained_workload(name: str, steps: int | None = None) -> mt.Workload:
    """Return a task of learning.py with the weights of a plain training of so many steps; None: its own."""
    task = TASKS[name]
    task = task._replace(steps=steps or task.steps)
    model = train(task, None, 0).model
    print(f"trained {task.steps} steps: {task.metric} {task.score(model):.3f}", flush=True)
    return with_weights(task.workload, model)


def compare(
    workload: mt.Workload, profile: mt.Profile, unseen: GradientError, rival: mt.Policy
) -> dict[str, Any]:
    """Compare `rival` with the policy that is solved for its bytes."""
    limits = profile.predict(rival)
    solved = mt.search_policy(
        profile, limits.peak_bytes, max_saved=limits.saved_bytes, objective="error", trials=0
    )
    require_no_larger(workload, rival, [solved.policy])
    errors = {"rival": unseen.errors(rival), "solved": unseen.errors(solved.policy)}
    lower = [one - other for one, other in zip(errors["rival"], errors["solved"], strict=True)]
    means = {name: statistics.fmean(values) for name, values in errors.items()}
    return {
        "peak_bytes": limits.peak_bytes,
        "saved_bytes": limits.saved_bytes,
        "rival_error": means["rival"],
        "bound": solved.bound,
        "solved_predicted": solved.predicted.gradient_error,
        "solved_error": means["solved"],
        "times_lower": means["rival"] / means["solved"],
        # Of the paired difference, in its standard errors: below -2, the rival is better.
        "standard_errors": statistics.fmean(lower) / (statistics.stdev(lower) / math.sqrt(len(lower))),
    }


def studied(
    workload: mt.Workload,
    profile: mt.Profile,
    unseen: GradientError,
    solved: dict[str, Any],
    uniform: mt.Policy,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Return what studies gain over the solved policy; nothing without studies."""
    if not arguments.seeds:
        return {}
    search = partial(mt.search_policy, profile, solved["peak_bytes"], max_saved=solved["saved_bytes"])
    studies = [
        search(
            objective="error",
            workload=workload,
            trials=arguments.trials,
            timeout=arguments.timeout,
            seed=seed,
        )
        for seed in range(arguments.seeds)
    ]
    require_no_larger(workload, uniform, [plan.policy for plan in studies])
    searched = [statistics.fmean(unseen.errors(plan.policy)) for plan in studies]
    return {
        "searched_errors": searched,
        "study_gain": mean_interval([1 - error / solved["solved_error"] for error in searched])._asdict(),
        "study_won": [plan.won for plan in studies],
        "trials": [plan.trials for plan in studies],
    }


def require_no_larger(workload: mt.Workload, uniform: mt.Policy, policies: list[mt.Policy]) -> None:
    """Exit if the saved or peak bytes of a policy's real step exceed the uniform policy's by over 1 %."""
    allowed = measured_bytes(workload, uniform)
    for policy in policies:
        measured = measured_bytes(workload, policy)
        if any(count > 1.01 * limit for count, limit in zip(measured, allowed, strict=True)):
            raise SystemExit(
                f"a searched policy is larger than the uniform one: {measured} against {allowed} bytes"
            )


def measured_bytes(workload: mt.Workload, policy: mt.Policy) -> tuple[int, int]:
    """Return saved and peak bytes of a real step."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with mt.compress_saved(policy, seed=0):
            return workload.compute_loss(model, batch)

    model = mt.convert(workload.build(), policy, seed=0)
    memory = measure_step(model, workload.make_batch(), loss, workload.make_optimizer(model))
    return memory.saved_bytes, memory.peak_bytes


def unseen_batches(workload: mt.Workload, count: int) -> list[Any]:
    """Return batches that no profile and no study draws."""
    batches = []
    for draw in range(count):
        torch.manual_seed(UNSEEN + draw)
        batches.append(workload.batch(workload.batch_size))
    return batches


class GradientError:
    """Gradient errors on `batches`: ‖ĝ − g‖² / ‖g‖² over all parameters."""

    def __init__(self, workload: mt.Workload, batches: list[Any]) -> None:
        self.workload, self.batches = workload, batches
        self.exact = [self.gradient(batch, None, 0) for batch in self.batches]

    def errors(self, policy: mt.Policy, seeds: int = 4) -> list[float]:
        """Return the errors of `policy`, by batch and rounding seed."""
        errors = []
        for batch, exact in zip(self.batches, self.exact, strict=True):
            for seed in range(seeds):
                change = self.gradient(batch, policy, 7_000 + seed) - exact
                errors.append((change.square().sum() / exact.square().sum()).item())
        return errors

    def error(self, policy: mt.Policy, seeds: int = 4) -> float:
        """Return the mean error of `policy`."""
        return statistics.fmean(self.errors(policy, seeds))

    def gradient(self, batch: Any, policy: mt.Policy | None, seed: int) -> Tensor:
        """Return the gradients of all parameters in one float64 vector."""
        model = self.workload.build()
        if policy is None:
            self.workload.compute_loss(model, batch).backward()
        else:
            mt.convert(model, policy, seed=seed)
            with mt.compress_saved(policy, seed=seed):
                value = self.workload.compute_loss(model, batch)
            value.backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def describe(title: str, result: dict[str, Any]) -> str:
    """Return a line about one rival."""
    text = (
        f"{title}: error {result['rival_error']:.2e}, solved {result['solved_error']:.2e}, "
        f"{result['times_lower']:.1f} times lower ({result['standard_errors']:+.1f} standard errors)"
    )
    if "promised" in result:
        text += f"; {result['promised']:g} promised"
    if "study_gain" in result:
        gain = result["study_gain"]
        text += f"; studies gain {gain['mean']:.1%} [{gain['low']:.1%}, {gain['high']:.1%}]"
    return text


if __name__ == "__main__":
    main()
