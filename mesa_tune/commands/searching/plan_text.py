"""A plan as text: lines of at most 80 characters for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mesa_tune.commands.common import Run, below, format_bytes, format_table, format_time, wrapped

if TYPE_CHECKING:
    from mesa_tune.profiles.profile import Profile
    from mesa_tune.search import Plan


def summary(plan: Plan, profile: Profile, run: Run) -> list[str]:
    """Return the plan in lines of at most 80 characters, with code for the training script."""
    return [
        f"{_budget(plan)} at batch size {plan.batch_size}" + _profiled(plan),
        *wrapped(_objective(plan), 11),
        f"  peak            {_change(plan.baseline.peak_bytes, plan.predicted.peak_bytes)}",
        *_peak(plan),
        f"  saved           {_change(plan.baseline.saved_bytes, plan.predicted.saved_bytes)}",
        *_errors(plan),
        *_step(plan, profile),
        *wrapped(f"study: {plan.won}" if plan.trials else plan.won, 7),
        *_next(plan, profile, run),
    ]


def table(plans: Sequence[Plan], profile: Profile, run: Run) -> list[str]:
    """Return one row for each plan of several budgets."""
    header = ["budget", "peak", "saved", "step", "gradient error", "noise ratio", "objective"]
    rows = format_table(header, [_row(plan, profile) for plan in plans])
    verify = f"next: mesa-tune verify --policy {plans[0].policy_path}{run.option}"
    return [*rows, *(f"wrote {plan.policy_path}" for plan in plans), verify]


def _row(plan: Plan, profile: Profile) -> list[str]:
    predicted = plan.predicted
    step, ratio = predicted.step_ms, predicted.gradient_noise_ratio
    return [
        "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes),
        format_bytes(predicted.peak_bytes),
        format_bytes(predicted.saved_bytes),
        "–" if step is None else f"{step / profile.plain_ms(plan.batch_size):.2f}x",
        f"{predicted.gradient_error:.1e}",
        "–" if ratio is None else f"{ratio:.1e}",
        plan.objective,
    ]


def _budget(plan: Plan) -> str:
    return "no budget" if plan.budget_bytes is None else f"budget {format_bytes(plan.budget_bytes)}"


def _objective(plan: Plan) -> str:
    """Return the objective that held, why it is not the one asked for, and what is proven."""
    if plan.solver == "none":
        return f"objective  {plan.objective}: nothing is compressed"
    ratio = plan.max_noise_ratio
    within = "" if ratio is None else f" within noise ratio {ratio:g}"
    reason = f", because {plan.why}" if plan.why else ""
    return f"objective  {plan.objective}{within}{reason}; {plan.claim}"


def _peak(plan: Plan) -> list[str]:
    peak = plan.predicted.peak
    return below("" if peak is None else peak.text)


def _next(plan: Plan, profile: Profile, run: Run) -> list[str]:
    if not plan.policy.rules:
        return [
            f"wrote {plan.policy_path}, which stores everything exactly: train as you are",
            f"next: mesa-tune report{run.option}",
        ]
    return [
        f"wrote {plan.policy_path}; in your training:",
        "",
        *(f"    {line}" for line in plan.training(profile)),
        "",
        f"next: mesa-tune verify{run.option}",
    ]


def _profiled(plan: Plan) -> str:
    return "" if plan.batch_size == plan.profiled_batch_size else f" (profiled at {plan.profiled_batch_size})"


def _change(before: int, after: int) -> str:
    share = f"  ({after / before:.0%})" if before else ""
    return f"{format_bytes(before)} -> {format_bytes(after)} predicted{share}"


def _errors(plan: Plan) -> list[str]:
    error = plan.predicted.gradient_error
    if not error:
        return ["  gradient error  0"]
    lines = [f"  gradient error  {error:.2e} predicted"]
    ends = plan.predicted.gradient_error_interval
    if ends is not None:
        lines.append(f"                  {ends[0]:.1e} to {ends[1]:.1e} expected on unseen batches")
    if plan.measured is not None:
        mean, spread = plan.measured.gradient_error, plan.measured.standard_error
        lines.append(f"                  {mean:.2e} ± {spread:.1e} measured on fresh batches")
    ratio = plan.predicted.gradient_noise_ratio
    if ratio is not None:
        lines.append(f"  noise ratio     {ratio:.1e} of the parameters' own noise")
    if plan.measured is not None and plan.measured.noise_ratio is not None:
        lines.append(f"                  {plan.measured.noise_ratio:.1e} measured on fresh batches")
    if plan.predicted.worst_own_ratio is not None:
        own = f"{plan.predicted.worst_own_ratio:.1e}"
        lines += below(f"at most {own} of one parameter's own: {plan.predicted.worst_parameter}")
    return lines


def _step(plan: Plan, profile: Profile) -> list[str]:
    from mesa_tune.profiles.prediction import UNSTEADY
    from mesa_tune.search.objectives import to_same_result

    if plan.predicted.step_ms is None or not profile.step_ms:
        return []
    plain = profile.plain_ms(plan.batch_size)
    ratio, noise = plan.predicted.step_ms / plain, plan.predicted.gradient_noise_ratio
    sure = "" if profile.time_spread <= UNSTEADY else ", uncertain: the machine was not steady"
    lines = [f"  step            {format_time(plain / 1000)} -> {ratio:.2f}x predicted{sure}"]
    if noise:
        same = to_same_result(ratio, noise)
        lines.append(
            f"                  {same:.2f}x to the same result, {1 - ratio / same:.2%} of it for noise"
        )
    return lines
