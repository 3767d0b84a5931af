"""The report as one HTML page: it needs no network and no other file, and works in dark mode and on paper.

What is hard: matplotlib writes fixed colours and ids into its SVG. Here colours become the page's CSS
variables, and ids get a prefix, so that several figures fit on one page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mesa_tune.profiler.profile import Prediction
from mesa_tune.reports import style
from mesa_tune.reports.contents import CAPTIONS, RunResults
from mesa_tune.units import format_bytes, format_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that the page's style sheet redefines for dark screens.
_VARIABLES = {
    style.INK: "var(--ink)",
    style.MUTED: "var(--muted)",
    style.GRID: "var(--grid)",
    style.SHEET: "var(--sheet)",
    style.BEFORE: "var(--before)",
    style.AFTER: "var(--after)",
    style.BUDGET: "var(--budget)",
    style.CHOSEN: "var(--chosen)",
}


def render(results: RunResults, tables: Mapping[str, pd.DataFrame], drawn: Mapping[str, Figure]) -> str:
    """Return the report as one HTML document, with the figures `drawn` inside as SVG."""
    environment = Environment(
        loader=PackageLoader("mesa_tune.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    return environment.get_template("report.html").render(
        title=_title(results),
        facts=_facts(results),
        notes=[*results.profile.notes, *results.missing],
        cards=summary(results),
        figures=[
            {"name": name, "caption": CAPTIONS[name], "svg": Markup(inline_svg(figure, name))}
            for name, figure in drawn.items()
        ],
        layers=_layer_rows(tables["memory_by_layer"]),
        searched=results.plan is not None,
        training="\n".join(results.plan.training(results.profile)) if results.plan else "",
    )


def inline_svg(figure: Figure, name: str) -> str:
    """Return the figure as an SVG element: its ids begin with `name`, its colours are CSS variables."""
    buffer = io.StringIO()
    with style.styled():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    label = name.replace("_", " ")
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG file on white."""
    buffer = io.BytesIO()
    with style.styled():
        figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def summary(results: RunResults) -> list[dict[str, str]]:
    """Return the cards at the top: `label, value, detail, source` for peak, saved bytes, error and time."""
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


def _code(text: str) -> Markup:
    """Escape `text`, and mark what is between backticks as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _title(results: RunResults) -> str:
    return results.profile.model.replace("\\", "/").rsplit("/", 1)[-1] if results.profile.model else "Model"


def _facts(results: RunResults) -> list[tuple[str, str]]:
    profile, plan = results.profile, results.plan
    facts = [
        ("device", profile.device),
        ("batch size", str(results.batch_size)),
        ("autocast", profile.autocast or "off"),
        ("layers", str(len(profile.layers))),
        ("torch", profile.torch),
    ]
    if plan is not None and plan.budget_bytes is not None:
        share = 100 * plan.budget_bytes / max(results.plain.reserved_bytes or results.plain.peak_bytes, 1)
        facts.insert(0, ("budget", f"{format_bytes(plan.budget_bytes)} ({share:.0f} % of plain)"))
    if plan is not None and plan.batch_size != profile.batch_size:
        facts.append(("profiled at batch", str(profile.batch_size)))
    return facts


def _card(label: str, value: str, detail: str, source: str = "measured") -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail, "source": source}


def _moment(prediction: Prediction) -> str:
    """Return when the predicted peak is, and what is alive then."""
    texts = ["" if prediction.peak is None else prediction.peak.text, prediction.workspaces_text]
    return "; ".join(f"predicted {text}" for text in texts if text)


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
        detail = f"mean of {count} measurements; predicted {style.error_text(expected)}{interval}"
        detail += _noise_text(verification.gradient_noise_ratio)
        return _card("Gradient error", style.error_text(verification.gradient_error), detail)
    detail = f"relative squared error{interval}{_noise_text(results.plan.predicted.gradient_noise_ratio)}"
    return _card("Gradient error", style.error_text(expected), detail, "predicted")


def _interval_text(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f" ({style.error_text(ends[0])} to {style.error_text(ends[1])})"


def _noise_text(ratio: float | None) -> str:
    return "" if ratio is None else f"; {style.error_text(ratio)} of the batches’ own noise"


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


def _layer_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the texts and sort values of the layer table, one dict per layer."""
    rows = []
    for number, layer in enumerate(frame.to_dict("records")):
        cells = {str(column): value for column, value in layer.items()}
        row: dict[str, Any] = {"number": number, **cells, "before_text": format_bytes(layer["before"])}
        if "after" in layer:
            row["after_text"] = format_bytes(layer["after"])
            row["error_text"] = style.error_text(layer["gradient_error"])
            row["share"] = round(100 * layer["after"] / layer["before"]) if layer["before"] else 0
        rows.append(row)
    return rows
