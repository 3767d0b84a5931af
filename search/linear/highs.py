"""Calls of HiGHS with sparse rows, and what their results mean.

The hard part: a result without values is not always "infeasible". HiGHS also stops at its limits of time and
nodes, with or without a solution, and its status tells these cases apart.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesa_tune.errors import RunError
from mesa_tune.search.problem import Floats

NODES = 200_000
_LEAST = 0.5
"""Seconds: less time is not halved."""
_OPTIMAL, _STOPPED, _INFEASIBLE, _UNKNOWN = 0, 1, 2, 4


class TimeUpError(RunError):
    """The time was up before there was any plan, or a proof that there is none."""


class Row(NamedTuple):
    """A constraint: `low` <= `values` · x <= `high`; `columns` are the positions of `values`."""

    columns: NDArray[np.int64]
    values: Floats
    low: float
    high: float


class Answer(NamedTuple):
    """What HiGHS found: `values` of the columns, None without any, and a proven lower bound on the cost."""

    values: Floats | None
    bound: float


@dataclass(frozen=True)
class Deadline:
    """The time until which a solve may take, all its parts together."""

    seconds: float = 60.0
    end: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "end", time.monotonic() + self.seconds)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def part(self, share: float) -> Deadline:
        """Return the deadline of a part that may take that share of the seconds that are left."""
        return Deadline(max(0.0, share * self.left))

    def error(self) -> TimeUpError:
        """Return the error for a time that was up."""
        return TimeUpError(
            f"the solver found no plan within {self.seconds:.3g} s, and did not prove that there is none\n"
            "raise the budget or another limit: such problems are easier to solve"
        )


def minimise(
    costs: Floats,
    rows: Sequence[Row],
    upper: Floats,
    deadline: Deadline,
    *,
    integral: NDArray[np.int64] | None = None,
    gap: float = 0.0,
) -> Answer:
    """Minimise `costs` · x with 0 <= x <= `upper` under `rows`; without `integral` all x may be fractions.

    Stop at half of the time that is left: its solution may need further rows. Return no values if the rows
    are infeasible. Raise TimeUpError if the time passes without a solution.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    if deadline.left <= 0:
        raise deadline.error()
    constraint = LinearConstraint(
        _matrix(rows, len(costs)), [row.low for row in rows], [row.high for row in rows]
    )
    for presolve in (True, False):  # HiGHS sometimes loses its way in what its presolve leaves
        with _silent():
            result = milp(
                costs,
                integrality=np.zeros(len(costs), dtype=np.int64) if integral is None else integral,
                bounds=Bounds(0.0, upper),
                constraints=constraint,
                options={
                    "mip_rel_gap": gap,
                    "node_limit": NODES,
                    "time_limit": max(deadline.left / 2, _LEAST),
                    "presolve": presolve,
                },
            )
        if result.status != _UNKNOWN:
            break
    return _answer(result, deadline)


def _answer(result: Any, deadline: Deadline) -> Answer:
    if result.status == _INFEASIBLE:
        return Answer(None, np.inf)
    if result.x is None:
        if result.status == _STOPPED:
            raise deadline.error()
        raise RunError(f"the solver failed: {result.message}\nreport it, with the profile.json")
    bound = result.mip_dual_bound
    # A linear program without integers is solved to its optimum, and has no bound apart from it.
    if bound is None:
        bound = result.fun if result.status == _OPTIMAL else -np.inf
    return Answer(result.x, float(bound))


def _matrix(rows: Sequence[Row], width: int) -> Any:
    from scipy.sparse import csr_array

    ends = np.cumsum([0, *(len(row.columns) for row in rows)])
    columns = np.concatenate([row.columns for row in rows])
    return csr_array((np.concatenate([row.values for row in rows]), columns, ends), shape=(len(rows), width))


@contextmanager
def _silent() -> Iterator[None]:
    """Silence standard output: HiGHS sometimes prints a line there in spite of its options."""
    sys.stdout.flush()
    stdout, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)
