"""The report of one run as one HTML page, which needs no network and no other file."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from mesa_tune.reports.cards import cards
from mesa_tune.reports.contents import CAPTIONS, RunResults
from mesa_tune.reports.page import csv_link, figure_parts, render_page
from mesa_tune.reports.sentence import sentence
from mesa_tune.reports.tables import LEGEND, SHARED, layer_rows
from mesa_tune.reports.tree import module_tree
from mesa_tune.units import format_bytes


def render(results: RunResults, tables: Mapping[str, pd.DataFrame], drawn: Mapping[str, str]) -> str:
    """Return the report as one HTML document, with the figures `drawn` (SVG files) inside."""
    plan, layers = results.plan, tables["layers"]
    return render_page(
        "report.html",
        {
            "title": results.title,
            "sentence": sentence(results),
            "facts": _facts(results),
            "notes": [*results.profile.notes, *results.missing],
            "cards": cards(results),
            "figures": {
                name: figure_parts(name, drawing, tables[name], CAPTIONS[name])
                for name, drawing in drawn.items()
            },
            "alive": tables["alive"].to_dict("records"),
            "tree": module_tree(layers, results.title),
            "layers": layer_rows(layers),
            "shared": SHARED,
            "legend": LEGEND,
            "layers_csv": csv_link(layers),
            "searched": plan is not None,
            "plan": plan,
            "training": "\n".join(plan.training(results.profile)) if plan else "",
            "measured_on": _measured_on(results),
            "made": results.made,
        },
    )


def _measured_on(results: RunResults) -> str:
    """Return on what, when and with which torch the steps were measured."""
    verification, made = results.verification, results.made.get("verify.json")
    if verification is None:
        return ""
    parts = [verification.device, f"torch {verification.torch}"]
    if made is not None:
        parts = [f"{verification.device} ({made.hardware})", f"torch {verification.torch}", made.date]
    return ", ".join(parts)


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
        share = 100 * plan.budget_bytes / max(results.plain.peak_bytes, 1)
        facts.insert(0, ("budget", f"{format_bytes(plan.budget_bytes)} ({share:.0f} % of plain)"))
    if plan is not None and plan.batch_size != profile.batch_size:
        facts.append(("profiled at batch", str(profile.batch_size)))
    return facts
