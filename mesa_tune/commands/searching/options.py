"""Options of `mesa-tune search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MAX_NOISE_RATIO = 0.005
"""As of `mt.search_policy`, whose import takes seconds."""

BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="BYTES",
        help="Peak of the whole step: 6GB, 6GiB, 40%, bytes; auto: what is free; several: 4GB,6GB.",
    ),
]
SmallestOption = Annotated[
    bool, typer.Option("--smallest", help="The lowest peak; needs no budget (objective memory).")
]
ObjectiveOption = Annotated[
    str,
    typer.Option(
        "--objective",
        metavar="time|error|memory",
        help="What is the least. Default: time, or error where no plan is within the noise ratio.",
    ),
]
NoiseOption = Annotated[
    float,
    typer.Option("--max-noise-ratio", metavar="R", help="Limit on error over the minibatch's own noise."),
]
MaxBatchOption = Annotated[
    bool, typer.Option("--max-batch", help="Plan for the largest batch size that fits the budget.")
]
MaxLengthOption = Annotated[
    bool,
    typer.Option(
        "--max-length", help="The smallest plan, and how long samples may be within the budget (LENGTH)."
    ),
]
PinOption = Annotated[
    list[str] | None,
    typer.Option("--pin", metavar="GLOB: SETTINGS", help="Settings of layers: 'blocks.0.*: level 16'."),
]
ForbidOption = Annotated[
    str | None,
    typer.Option("--forbid", metavar="WORDS", help="Some of derive,recompute,offload,tile,rows,levels."),
]
OnlyOption = Annotated[
    str | None, typer.Option("--only", metavar="KEYS", help="Settings that may vary: level,group_size.")
]
BatchOption = Annotated[
    int | None,
    typer.Option("--batch-size", metavar="N", help="Plan for this batch size; default: the profiled one."),
]
TrialsOption = Annotated[
    int | None,
    typer.Option(
        "--trials", metavar="N", help="Trials of the study; 0 needs no model. Default: 10, or 30 s."
    ),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", metavar="S", help="Seconds that the search may take, for all budgets."),
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the study.")]
SlowdownOption = Annotated[
    float | None,
    typer.Option("--max-slowdown", metavar="X", help="Limit on step time over the plain step's: 1.2"),
]
SavedOption = Annotated[
    str | None, typer.Option("--max-saved", metavar="BYTES", help="Limit on saved bytes as well.")
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="FILE", help="profile.json of another run; it is copied into this run."
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Overwrite files edited by hand or of other inputs; start a new study."),
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URL",
        envvar="MESA_TUNE_STORAGE",
        show_envvar=False,
        help="Of the study: URL (also in MESA_TUNE_STORAGE) or journal:PATH; default: in the run's folder.",
    ),
]
WorkersOption = Annotated[
    int, typer.Option("--workers", metavar="N", help="Processes that work on the study on this machine.")
]
JoinOption = Annotated[
    str | None,
    typer.Option("--join", metavar="STUDY", help="Work on a study that was begun elsewhere: its name."),
]
