"""The cards below the first sentence: peak, saved bytes, gradient error and step time."""

from __future__ import annotations

from mesa_tune.profiles.profile import Prediction
from mesa_tune.reports.contents import RunResults
from mesa_tune.units import format_bytes, format_error, format_time


def cards(results: RunResults) -> list[dict[str, str]]:
    """Return the cards: `label, value, detail, source` for peak, saved bytes, error and time."""
    plan, plain, ms = results.plan, results.plain, results.profile.step_ms
    if plan is None:
        return [
            _card("Peak of the step", format_bytes(plain.peak_bytes), _moment(plain)),
            _card("Saved for backward", format_bytes(plain.saved_bytes), "the part that a policy can shrink"),
            _card("Step time", "not known" if ms is None else format_time(ms / 1000), "plain"),
        ]
    return [
        _bytes_card("Peak of the step", "peak_bytes", results, _moment(plan.predicted)),
        _bytes_card("Saved for backward", "saved_bytes", results),
        _error_card(results),
        _time_card(results)
        if results.verification
        else _card("Step time", *_predicted_time(results), "predicted"),
    ]


def _card(label: str, value: str, detail: str, source: str = "measured") -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail, "source": source}


def _moment(prediction: Prediction) -> str:
    """Return when the predicted peak is."""
    return "" if prediction.peak is None else f"predicted {prediction.peak.moment}"


def _bytes_card(label: str, quantity: str, results: RunResults, more: str = "") -> dict[str, str]:
    assert results.plan is not None
    before, after = getattr(results.plain, quantity), getattr(results.plan.predicted, quantity)
    verification, source = results.verification, "predicted"
    if verification is not None and getattr(verification.policy, quantity) is not None:
        after, source = getattr(verification.policy, quantity), "measured"
        before = getattr(verification.baseline, quantity) or before
    share = f"{100 * (1 - after / before):.0f} % less" if before else ""
    detail = f"from {format_bytes(before)}, {share}" + (f"; {more}" if more else "")
    return _card(label, format_bytes(after), detail, source)


def _error_card(results: RunResults) -> dict[str, str]:
    assert results.plan is not None
    verification = results.verification
    expected = results.plan.predicted.gradient_error
    interval = _interval_text(results.plan.predicted.gradient_error_interval)
    if verification is not None and verification.gradient_error is not None:
        count = len(verification.gradient_errors)
        detail = f"mean of {count} measurements; predicted {format_error(expected)}{interval}"
        detail += _noise_text(verification.gradient_noise_ratio)
        return _card("Gradient error", format_error(verification.gradient_error), detail)
    detail = f"relative squared error{interval}{_noise_text(results.plan.predicted.gradient_noise_ratio)}"
    return _card("Gradient error", format_error(expected), detail, "predicted")


def _interval_text(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f" ({format_error(ends[0])} to {format_error(ends[1])})"


def _noise_text(ratio: float | None) -> str:
    return "" if ratio is None else f"; {format_error(ratio)} of the parameters’ own noise"


def _time_card(results: RunResults) -> dict[str, str]:
    assert results.verification is not None
    plain, policy = results.verification.baseline, results.verification.policy
    ratio = results.verification.step_ratio
    if ratio is None or policy.step_ms is None or plain.step_ms is None:
        return _card("Step time", *_predicted_time(results), "predicted")
    times = f"{format_time(plain.step_ms / 1000)} → {format_time(policy.step_ms / 1000)}"
    spread = f"{ratio.low:.2f}–{ratio.high:.2f}"
    return _card("Step time", f"{ratio.median:.2f}×", f"{times}; middle half {spread}×")


def _predicted_time(results: RunResults) -> tuple[str, str]:
    assert results.plan is not None
    after, before = results.plan.predicted.step_ms, results.plain.step_ms
    if not after or not before:
        return "not known", ""
    return f"{after / before:.2f}×", f"{format_time(before / 1000)} → {format_time(after / 1000)}"
