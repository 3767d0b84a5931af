"""What a notebook shows of a profile and of quantities that are predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mesa_tune.notebook import note, shown, table
from mesa_tune.units import counted, format_bytes, format_error, format_time

QUANTITIES = {
    "saved_bytes": "bytes",
    "peak_bytes": "bytes",
    "step_ms": "ms",
    "gradient_error": "",
    "gradient_noise_ratio": "",
}
"""What is predicted and measured, with its unit."""
TITLES = {
    "saved_bytes": "saved",
    "peak_bytes": "peak",
    "step_ms": "step time",
    "gradient_error": "gradient error",
    "gradient_noise_ratio": "noise ratio",
}
_LAYERS = 10


def quantity_text(name: str, value: float | None) -> str:
    """Return the value of one of `QUANTITIES` as text; `not known` for None."""
    if value is None:
        return "not known"
    if QUANTITIES[name] == "bytes":
        return format_bytes(value)
    return format_time(value / 1000) if QUANTITIES[name] == "ms" else format_error(value)


def quantities_html(
    title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], below: str = ""
) -> str:
    """Return a table of `rows`: `quantity`, and a value in each of `columns`."""
    lines = [
        [TITLES[row["quantity"]], *(quantity_text(row["quantity"], row[column]) for column in columns)]
        for row in rows
    ]
    return shown(title, table(["", *columns], lines), note(below))


def profile_html(profile: Mapping[str, Any]) -> str:
    """Return the facts of a profile, its values by name, and the layers that save the most."""
    facts = [
        ("peak of a step", format_bytes(profile["peak_bytes"])),
        ("saved for backward", format_bytes(profile["saved_bytes"])),
        ("step time", "not known" if profile["step_ms"] is None else format_time(profile["step_ms"] / 1000)),
        ("gradient noise", format_error(profile["gradient_noise"])),
    ]
    of = profile["model"] or profile["script"] or "a model"
    largest = sorted(profile["layers"], key=lambda layer: -layer.own_bytes)
    total = max(sum(layer.own_bytes for layer in largest), 1)
    rows = [
        [layer.name, layer.tag, format_bytes(layer.own_bytes), f"{100 * layer.own_bytes / total:.0f} %"]
        for layer in largest[:_LAYERS]
    ]
    rest = largest[_LAYERS:]
    further = f"{counted(len(rest), 'further layer')}: {format_bytes(sum(layer.own_bytes for layer in rest))}"
    return shown(
        f"Profile of {of}: batch {profile['batch_size']} on {profile['device']}",
        table(["", ""], facts),
        table(["layer", "tag", "saves", "of all"], rows, left=2),
        note(further if rest else ""),
    )
