"""`mesa-tune tree`: what the modules of a run save, as a tree."""

from __future__ import annotations

from typing import Annotated

import typer

from mesa_tune.commands.common import (
    DEFAULT_RUN,
    DebugOption,
    JsonOption,
    Output,
    QuietOption,
    Run,
    RunOption,
    format_table,
)
from mesa_tune.commands.report import load_results

LeastOption = Annotated[
    float,
    typer.Option(
        "--least", metavar="SHARE", min=0, max=1, help="Modules that save less are one line. Default: 0.01."
    ),
]


def tree(
    run: RunOption = DEFAULT_RUN,
    least: LeastOption = 0.01,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what each module saves, plain and under the policy."""
    from mesa_tune.reports.frames import layers_frame
    from mesa_tune.reports.tree import module_tree, tree_lines

    output = Output(json=as_json, quiet=quiet)
    results, notes = load_results(Run(run))
    for note in notes:
        output.warn(note)
    layers = layers_frame(results.profile, results.assignment, results.batch_size)
    root = module_tree(layers, results.title)
    header = ["module", "saves", "under the policy"][: 1 + len(root.bytes)]
    for line in format_table(header, list(tree_lines(root, least))):
        output.line(line)
    output.document("tree", root.to_dict())
