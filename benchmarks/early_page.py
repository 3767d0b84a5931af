"""The first part of docs/learning.md: plans solved before training, from `early_plans.py`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common import Interval, mean_interval

Line = Mapping[str, Any]
MARGIN = 0.01
"""Largest difference that counts as none: one point of accuracy, one percent of the loss."""
HEAD = """\
## Plans solved before training

`python benchmarks/early_plans.py`. Every task is profiled before its first step, as a user does.

* **40 %**: the plan for 40 % of the plain peak, or for the least multiple of 5 % within reach. **smallest**:
  as of `mesa-tune search --smallest`. Both are within a noise ratio of 0.005; smallest of lora within 0.03,
  the default before. **uniform 2 bits**: a control that learns worse; of resnet it does not, so this task
  tells nothing apart. No plan was solved again in training, but **40 %, read again**:
  `mt.Monitor(remedy="plan")` read its ratio after 50, 100, 200, 400, ... steps.
* Since lora was trained, a search counts no layer's ratio as less than the mean of layers stored alike.
  Before, the plan for 40 % of text had a ratio of 0.12 at its largest and learned 2.20 % worse (0.91 to
  3.49); that of llama 0.69 and 0.29 %. Steps of denoiser and llama were timed on a busy machine.
* One plain training of text, of ten, ended at 2.16 and the others at 1.93 to 1.97, which makes its intervals
  wide.
* One bit of fixed levels for tanh (GPT-2's activation) was within the ratio before the training of text, grew
  to 10⁹ times the noise, and ended at a loss of 3.10: no function gets them any more whose derivative is near
  zero on both sides.
* **ratio**: the noise ratio, of each parameter beside its own noise ([concepts.md](concepts.md)): predicted
  before training; measured before the first step, and the largest at the tenths of the training with the
  first seed; by a meter that shares no code with the profile. **worst**: the largest of a parameter, or part
  of one, at any tenth. **growth**: last over first ratio, beside that of uniform 4 bits with the same
  weights.
* **difference to plain**: mean of the differences of pairs with the same seed, with its 95 % interval by
  Student's t: percentage points of accuracy, or percent of the plain loss. **within ±1 %**: the interval is.

"""
COLUMNS = (
    "task",
    "plan",
    "peak",
    "step",
    "ratio predicted",
    "at start",
    "largest",
    "worst",
    "growth, of 4 bits",
    "seeds",
    "difference to plain",
    "within ±1 %",
)
PLAIN, READ = "plain", "read again"


Runs = dict[str, dict[int, Line]]  # trainings by policy and seed


def by_code(lines: Sequence[Line], task: str) -> list[tuple[str, dict[str, Line], Runs]]:
    """Return each code that a task has lines of, the latest first, with its policies and their trainings."""
    own = [line for line in lines if line["task"] == task]
    codes = []
    for code in dict.fromkeys(line["code"] for line in reversed(own)):
        policies: dict[str, Line] = {}
        runs: Runs = {}
        for line in own:
            if line["code"] == code and line["seed"] is None:
                policies.setdefault(line["policy"], line)
            elif line["code"] == code:
                runs.setdefault(line["policy"], {})[line["seed"]] = line
        codes.append((code, policies, runs))
    return codes


def section(lines: Sequence[Line]) -> str:
    """Return the section of the latest code's lines; nothing if there are none."""
    rows = []
    for task in dict.fromkeys(line["task"] for line in lines):
        _, plans, runs = by_code(lines, task)[0]
        if len(runs.get(PLAIN, {})) < 2:  # one pair has no interval
            continue
        rows += [_row(plan, runs.get(PLAIN, {}), runs.get(label, {})) for label, plan in plans.items()]
    table = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ("---",) * len(COLUMNS))]
    return HEAD + "\n".join([*table, *filter(None, rows), ""]) if rows else ""


def difference(plan: Line, plain: Mapping[int, Line], runs: Mapping[int, Line]) -> Interval:
    """Return the mean paired difference to plain, with its 95 % interval, as a fraction.

    Raise ValueError if two runs of one seed drew different random numbers.
    """
    paired = []
    for seed in sorted(runs.keys() & plain.keys()):
        if plain[seed]["drawn"] != runs[seed]["drawn"]:
            raise ValueError(f"{plan['policy']}, seed {seed}: not the batches of the plain training")
        change = runs[seed]["score"] - plain[seed]["score"]
        paired.append(change / plain[seed]["score"] if plan["relative"] else change)
    return mean_interval(paired)


def _row(plan: Line, plain: Mapping[int, Line], runs: Mapping[int, Line]) -> str:
    if plan["policy"] == PLAIN:
        scores = [line["score"] for line in plain.values()]
        score = f"{plan['metric']} {statistics.fmean(scores):.3f}" if scores else ""
        return f"| {plan['task']} | plain | 100% | 1.00 | – | – | – | – | – | {len(scores)} | {score} | |"
    if len(runs.keys() & plain.keys()) < 2:
        return ""
    found = difference(plan, plain, runs)
    within = "yes" if found.low >= -MARGIN and found.high <= MARGIN else "no"
    budget = (plan["budget"] or "").replace("%", " %")
    label = f"{budget}, {plan['policy']}" if plan["policy"] == READ else budget or plan["policy"]
    shown = f"{100 * found.mean:+.2f} ({100 * found.low:+.2f} … {100 * found.high:+.2f})"
    cells = [
        plan["task"],
        label,
        f"{plan['peak']:.0%}",
        f"{plan['step']:.2f}",
        _number(plan["predicted"]),
        *_growth(next((line["growth"] for line in runs.values() if line["growth"]), [])),
        str(len(runs)),
        shown,
        within,
    ]
    return f"| {' | '.join(cells)} |"


def _growth(growth: Sequence[Sequence[float]]) -> list[str]:
    """Return the first and the largest ratio, the worst of a parameter, and both growths."""
    if not growth:
        return ["–"] * 4
    own, worst, four = ([row[column] for row in growth] for column in (1, 2, 3))
    times = f"{own[-1] / own[0]:.1f}, {four[-1] / four[0]:.1f}" if own[0] > 0 else "–"
    return [_number(own[0]), _number(max(own)), _number(max(worst)), times]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"
