"""How much lower is the gradient error of a searched policy than that of uniform bits, at the same bytes?

    python benchmarks/search_vs_uniform.py [--seeds 5] [--trials 100] [--steps 600] [--batches 8]

The model is the digits ViT, trained to convergence. For uniform 4, 3 and 2 bits, the search gets the uniform
policy's peak and saved bytes as limits. The gradient errors of both policies are then computed by the code of
this file, on batches and rounding seeds that the search has not seen. The result also has the solver's bound,
the solution without a study, and the gain of the study over `--seeds` studies. The bytes of both policies are
measured before any error.
"""

from __future__ import annotations

import argparse
from functools import partial
from types import ModuleType
from typing import Any

import torch
from accuracy import load_example
from common import append, mean_interval
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.profiler.memory.meter import measure_step

PROMISED = {4: 30.0, 3: 20.0, 2: 8.0}
UNSEEN = 50_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5, help="studies of each kind (at least 2)")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=None, help="seconds per study")
    parser.add_argument("--steps", type=int, default=600, help="training steps before anything is measured")
    parser.add_argument("--batches", type=int, default=8, help="unseen batches for the gradient errors")
    arguments = parser.parse_args()
    example = load_example()
    workload = trained_workload(example, arguments.steps)
    profile = mt.profile(workload, seeds=4)
    for bits, promised in PROMISED.items():
        result = compare(workload, profile, example, bits, arguments)
        result["promised"] = promised
        report(result)
        append("search_vs_uniform", {"subject": "digits ViT, converged", "steps": arguments.steps, **result})


def trained_workload(example: ModuleType, steps: int) -> mt.Workload:
    """Return the example as a workload whose models have the weights of a plain training of so many steps."""
    trained = train(example, steps)
    return mt.Workload(
        lambda: copy_of(example, trained),
        example.batch,
        example.loss,
        example.optimizer,
        batch_size=example.BATCH_SIZE,
    )


def train(example: ModuleType, steps: int) -> nn.Module:
    """Return the example's model after plain training."""
    torch.manual_seed(0)
    model: nn.Module = example.model()
    optimizer = example.optimizer(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, example.LEARNING_RATE, total_steps=steps, pct_start=example.WARMUP
    )
    value = torch.zeros(())
    for _ in range(steps):
        value = example.loss(model, example.batch(example.BATCH_SIZE))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
    print(
        f"trained {steps} steps: loss {value.item():.4f}, test accuracy {example.accuracy(model):.3f}",
        flush=True,
    )
    return model.train()


def copy_of(example: ModuleType, trained: nn.Module) -> nn.Module:
    """Return a new model with the trained weights."""
    model: nn.Module = example.model()
    model.load_state_dict(trained.state_dict())
    return model


def compare(
    workload: mt.Workload, profile: mt.Profile, example: ModuleType, bits: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Compare uniform `bits` with the solved and the studied policies at the uniform policy's bytes."""
    uniform = mt.Policy.uniform(level=2**bits)
    limits = profile.predict(uniform)
    search = partial(
        mt.search_policy, profile, limits.peak_bytes, max_saved=limits.saved_bytes, objective="error"
    )
    solved = search(trials=0)
    studies = [
        search(workload=workload, trials=arguments.trials, timeout=arguments.timeout, seed=seed)
        for seed in range(arguments.seeds)
    ]
    require_no_larger(workload, uniform, [solved.policy, *(plan.policy for plan in studies)])
    unseen = GradientError(workload, unseen_batches(example, workload.batch_size, arguments.batches))
    profiled = GradientError(workload, [workload.make_batch()])
    errors = {"uniform": unseen.error(uniform), "solved": unseen.error(solved.policy)}
    searched = [unseen.error(plan.policy) for plan in studies]
    gains = [1 - error / errors["solved"] for error in searched]
    return {
        "bits": bits,
        "peak_bytes": limits.peak_bytes,
        "saved_bytes": limits.saved_bytes,
        "uniform_error": errors["uniform"],
        "bound": solved.bound,
        "solved_predicted": solved.predicted.gradient_error,
        "solved_on_profiled_batch": profiled.error(solved.policy, seeds=8),
        "solved_error": errors["solved"],
        "solved_times_lower": errors["uniform"] / errors["solved"],
        "searched_errors": searched,
        "searched_times_lower": [errors["uniform"] / error for error in searched],
        "study_gain": mean_interval(gains)._asdict(),
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


def unseen_batches(example: ModuleType, size: int, count: int) -> list[Any]:
    """Return batches that no profile and no study draws."""
    batches = []
    for draw in range(count):
        torch.manual_seed(UNSEEN + draw)
        batches.append(example.batch(size))
    return batches


class GradientError:
    """Gradient errors on `batches`: ‖ĝ − g‖² / ‖g‖² over all parameters, mean over batches and seeds."""

    def __init__(self, workload: mt.Workload, batches: list[Any]) -> None:
        self.workload, self.batches = workload, batches
        self.exact = [self.gradient(batch, None, 0) for batch in self.batches]

    def error(self, policy: mt.Policy, seeds: int = 4) -> float:
        """Return the mean error of `policy`."""
        errors = []
        for batch, exact in zip(self.batches, self.exact, strict=True):
            for seed in range(seeds):
                change = self.gradient(batch, policy, 7_000 + seed) - exact
                errors.append((change.square().sum() / exact.square().sum()).item())
        return sum(errors) / len(errors)

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


def report(result: dict[str, Any]) -> None:
    """Print the result of one number of bits."""
    gain = result["study_gain"]
    least = min(result["searched_times_lower"])
    print(f"\nuniform {result['bits']} bits: error {result['uniform_error']:.2e}")
    print(f"  lower bound of the sum  {result['bound']:.2e}")
    lower = result["solved_times_lower"]
    ratio = result["solved_on_profiled_batch"] / result["solved_predicted"]
    print(f"  --trials 0              {result['solved_error']:.2e}  {lower:6.1f} times lower,", end=" ")
    print(f"{ratio:.2f} times its prediction on the profiled batch")
    print(f"  searched, the worst     {max(result['searched_errors']):.2e}  {least:6.1f} times lower")
    print(f"  the study adds          {gain['mean']:.1%} [{gain['low']:.1%}, {gain['high']:.1%}]")
    print(
        f"  at least {result['promised']:.0f} times: {'yes' if least >= result['promised'] else 'NO'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
