"""`mesa-tune diff`: which layers of one profile save more or less than those of another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesa_tune.commands.common import (
    DebugOption,
    JsonOption,
    Output,
    QuietOption,
    Run,
    format_bytes,
    format_table,
    format_time,
)
from mesa_tune.commands.guide.state import next_step

if TYPE_CHECKING:
    from mesa_tune.profiles.profile import Profile

BeforeArgument = Annotated[Path, typer.Argument(metavar="before", help="A run folder, or its profile.json.")]
AfterArgument = Annotated[Path, typer.Argument(metavar="after", help="The other one.")]

_MAX_ROWS = 12
_TOTALS = ("peak_bytes", "saved_bytes", "static_bytes", "step_ms")
_CONDITIONS = ("device", "batch_size", "autocast", "torch")


def diff(
    before: BeforeArgument,
    after: AfterArgument,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare two profiles: which layer saves more, and how much."""
    profiles = [_profile(path) for path in (before, after)]
    output, document = Output(json=as_json, quiet=quiet), compare(*profiles)
    for name in _CONDITIONS:
        old, new = (document[side][name] for side in ("before", "after"))
        if old != new:
            output.warn(f"{name.replace('_', ' ')} was {old} before, and is {new} after")
    for line in _lines(document):
        output.line(line)
    run = Run(after if after.is_dir() else after.parent)
    output.line()
    output.line(next_step(run))
    output.document("diff", document)


def _profile(path: Path) -> Profile:
    from mesa_tune.profiles.profile import Profile

    return Profile.load(Run(path, force=False).profile if path.is_dir() else path)


def compare(before: Profile, after: Profile) -> dict[str, Any]:
    """Return totals of both profiles, and the layers whose own bytes differ, the largest difference first.

    A layer that one of them does not have saves None there.
    """
    owned = [{layer.name: layer.own_bytes for layer in profile.layers} for profile in (before, after)]
    layers = [
        {"name": name, "before": owned[0].get(name), "after": owned[1].get(name)}
        for name in dict.fromkeys([*owned[0], *owned[1]])
        if owned[0].get(name) != owned[1].get(name)
    ]
    sides = {
        side: {name: getattr(profile, name) for name in (*_TOTALS, *_CONDITIONS)}
        for side, profile in (("before", before), ("after", after))
    }
    return {**sides, "layers": sorted(layers, key=lambda layer: -abs(_difference(layer)))}


def _difference(layer: dict[str, Any]) -> int:
    return int((layer["after"] or 0) - (layer["before"] or 0))


def _lines(document: dict[str, Any]) -> list[str]:
    before, after = document["before"], document["after"]
    totals = [
        [label, form(before[name]), form(after[name]), _share(before[name], after[name])]
        for label, name, form in (
            ("peak of a step", "peak_bytes", format_bytes),
            ("saved activations", "saved_bytes", format_bytes),
            ("weights, optimizer, batch", "static_bytes", format_bytes),
            ("a step takes", "step_ms", lambda value: format_time(value / 1000)),
        )
        if before[name] is not None and after[name] is not None
    ]
    changed = [layer for layer in document["layers"] if _difference(layer)]
    rows = [[layer["name"], *_cells(layer)] for layer in changed[:_MAX_ROWS]]
    if rest := changed[_MAX_ROWS:]:
        rows.append([f"{len(rest)} further layers", "", "", _signed(sum(map(_difference, rest)))])
    layers = format_table(["layer", "before", "after", "change"], rows)
    return [
        *format_table(["", "before", "after", "change"], totals),
        "",
        *(layers if rows else ["no layer saves more or less"]),
    ]


def _cells(layer: dict[str, Any]) -> list[str]:
    sides = ["–" if layer[side] is None else format_bytes(layer[side]) for side in ("before", "after")]
    return [*sides, _signed(_difference(layer))]


def _signed(difference: int) -> str:
    return f"{'+' if difference > 0 else '-'}{format_bytes(abs(difference))}"


def _share(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %" if before else "–"
