"""The report's first sentence: what the policy gives and costs, and whether that is measured or predicted.

What is hard: every part may be unknown, and the plain step may not even fit. What is unknown is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesa_tune.policy import Policy
from mesa_tune.profiles.prediction import UNSTEADY
from mesa_tune.reports.contents import RunResults
from mesa_tune.units import format_bytes, unbroken

_AS_FAST = 0.005


@dataclass(frozen=True)
class Sentence:
    """`text`, and in words where its numbers come from."""

    text: str
    source: str


def sentence(results: RunResults) -> Sentence:
    """Return what the run found, in one sentence."""
    plan, batch = results.plan, results.batch_size
    if plan is None:
        return _of_profile(results)
    if plan.is_exact:
        peak = format_bytes(plan.predicted.peak_bytes)
        return Sentence(
            unbroken(f"Trains at batch {batch} in {peak} as it is: the plain step fits the budget."),
            "Predicted from the profile.",
        )
    parts = [f"Trains at batch {batch} in {_peaks(results)}", _time(results)]
    noise = _noise(results)
    text = ", ".join(part for part in parts if part) + (f"; {noise}" if noise else "")
    return Sentence(unbroken(f"{text}."), _source(results))


def _peaks(results: RunResults) -> str:
    assert results.plan is not None
    after, before, note = results.plan.predicted.peak_bytes, results.plain.peak_bytes, ""
    verification = results.verification
    if verification is not None:
        after = verification.policy.peak_bytes or after
        note = " (predicted: the plain step does not fit)" if verification.baseline.peak_bytes is None else ""
        before = verification.baseline.peak_bytes or before
    return f"{format_bytes(after)} instead of {format_bytes(before)}{note}"


def _time(results: RunResults) -> str:
    """Return `6 % slower`, what the measured pairs tell if they disagree; empty if the times are unknown."""
    ratio, check = step_ratio(results), results.verification
    if ratio is None:
        return ""
    pairs = None if check is None else check.step_ratio
    if pairs is not None and pairs.low < 1 < pairs.high and pairs.high - pairs.low > UNSTEADY:
        return f"a step’s time uncertain ({_slower(pairs.low)} to {_slower(pairs.high)})"
    if pairs is None and results.profile.time_spread > UNSTEADY:
        return "a step’s time uncertain"
    return _slower(ratio)


def _slower(ratio: float) -> str:
    if abs(ratio - 1) < _AS_FAST:
        return "as fast"
    return f"{100 * abs(ratio - 1):.0f} % {'slower' if ratio > 1 else 'faster'}"


def step_ratio(results: RunResults) -> float | None:
    """Return the time of a step under the policy over that of a plain one, measured if it was."""
    assert results.plan is not None
    if results.verification is not None and results.verification.step_ratio is not None:
        return results.verification.step_ratio.median
    predicted, plain = results.plan.predicted.step_ms, results.plain_ms
    return predicted / plain if predicted and plain else None


def noise_ratio(results: RunResults) -> float | None:
    """Return the gradient noise ratio of the policy, measured if it was."""
    assert results.plan is not None
    if results.verification is not None and results.verification.gradient_noise_ratio is not None:
        return results.verification.gradient_noise_ratio
    return results.plan.predicted.gradient_noise_ratio


def gradient_error(results: RunResults) -> float | None:
    """Return the gradient error of the policy, measured if it was."""
    assert results.plan is not None
    if results.verification is not None and results.verification.gradient_error is not None:
        return results.verification.gradient_error
    return results.plan.predicted.gradient_error


def _noise(results: RunResults) -> str:
    ratio, error = noise_ratio(results), gradient_error(results)
    if ratio is not None:
        return f"the gradient’s noise grows by {percent(ratio)}"
    return "" if error is None else f"the gradient is off by {percent(error)} of its squared length"


def percent(fraction: float) -> str:
    """Return a fraction as text with two digits: `0.43 %`, `1.6 %`, `12 %`; less than 0.01 % as such."""
    if 0 < fraction < 1e-4:
        return "less than 0.01 %"
    return f"{100 * fraction:.2g} %" if fraction < 1 else f"{100 * fraction:.0f} %"


def _source(results: RunResults) -> str:
    verification = results.verification
    if verification is None:
        return "Predicted from the profile."
    unmeasured = {
        "time": verification.step_ratio is None and step_ratio(results) is not None,
        "noise": verification.gradient_noise_ratio is None and noise_ratio(results) is not None,
    }
    rest = " and ".join(name for name, missing in unmeasured.items() if missing)
    return f"Measured in real steps; {rest} predicted." if rest else "Measured in real steps."


def _of_profile(results: RunResults) -> Sentence:
    plain, profile = results.plain, results.profile
    share = 100 * plain.saved_bytes / max(plain.peak_bytes, 1)
    text = (
        f"A plain step at batch {results.batch_size} takes {format_bytes(plain.peak_bytes)}, of which "
        f"{format_bytes(plain.saved_bytes)} ({share:.0f} %) are saved for backward"
    )
    if profile.script is not None or profile.partial:
        return Sentence(unbroken(f"{text}."), "Observed in a step.")
    uniform = profile.predict(Policy.uniform(level=16), batch_size=results.batch_size)
    noise = uniform.gradient_noise_ratio
    cost = "" if noise is None else f", and the gradient’s noise would grow by {percent(noise)}"
    return Sentence(
        unbroken(f"{text}; with 4 bits everywhere it would take {format_bytes(uniform.peak_bytes)}{cost}."),
        "The plain step is the profile’s, the rest is predicted from it.",
    )
