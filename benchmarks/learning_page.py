"""Write docs/learning.md: scores after training under policies beside plain ones, from `learning.py`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import Interval
from early_page import MARGIN, PLAIN, by_code, difference, section
from learning_policies import AS_FAST, GREEDY_AT, SEARCHED_AT, TWO_BITS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "learning.md"

Line = Mapping[str, Any]
COLUMNS = (
    "policy",
    "peak",
    "saved",
    "step",
    "ratio predicted",
    "at start",
    "at end",
    "seeds",
    "score",
    "difference to plain",
    "contains zero",
    "within ±1 %",
)
HEAD = """\
# Learning under policies

Does training under a policy within a noise ratio end as plain training does?
`python benchmarks/learning.py --docs` writes this page.
"""
LATE = """\
## Plans solved with the weights at the end of training

These were made first, with `python benchmarks/learning.py`, and are not made again: nobody has these weights
before training.

* Noise ratios below are of all parameters together: the sum of squared errors over the sum of
  variances. Until version 2 of profile.json mesa-tune counted so, and not beside each parameter's own noise
  ([concepts.md](concepts.md)).
* **fastest**: the fastest policy of the search within the smallest of the budgets 40 %, 45 %, … of the plain
  peak that is within reach; **smallest**: the lowest peak, as of `mesa-tune search --smallest`. Both are
  solved from a profile (no study), within the default noise ratio of 0.03 or the one named.
* Rivals, with no limit on the ratio: **uniform** bits; **Mesa**: 8 bits with running ranges; **DropIT 0.9**:
  of linear layers and convolutions the largest tenth of the elements, exact; **WTA-CRS 0.3**: of these 30 %
  of the rows, exact; **greedy**: bits by layer as GACT chooses them, within the saved bytes of another
  policy.
* **least error at the bytes of**: by the search (`--objective error`), within the saved bytes and the peak of
  another policy; **and the step time of**: also within its predicted step.
* Noise ratios grow during training. So the profile has the weights at the end of a plain training with
  another seed; **untrained**: the weights before training.
* **peak**, **saved**: predicted bytes, in % of the plain peak. **step**: predicted time of a step over that
  of a plain one; searched policies may run modules again, which rivals do not. **ratio predicted**: for the
  profiled weights. **at start**: measured with untrained weights. **at end**: measured with the last weights
  of each training under the policy, on batches that nothing was chosen on; mean and largest of all seeds.
* A seed determines initialization and batches, equally for all policies. **difference to plain**: mean of the
  paired differences, with its 95 % interval by Student's t. Accuracies differ in percentage points, losses in
  percent of the plain loss.
* An interval that contains zero only because it is wide shows nothing: it must also be **within ±1 %**.
* With an asterisk: trained by earlier code, as the plain runs that it is compared with.
"""

EQUAL_BYTES = """\
## At equal bytes

The search and its rivals take the saved bytes and the peak of uniform 2 bits at most. **better by**: mean of
the paired differences, points of accuracy or percent of the rival's loss, with its 95 % interval. **step**:
of both, as above: at equal bytes the search gets there by running modules again.

| task | search | rival | seeds | better by | beyond doubt | step |
| --- | --- | --- | --- | --- | --- | --- |
"""
SEARCHES = {SEARCHED_AT: "any step", AS_FAST: f"as fast as {TWO_BITS}"}


def write(lines: Sequence[Line], early: Sequence[Line]) -> Path:
    """Write the page from `lines`, oldest first, and those of `early_plans.py`; return its path."""
    PAGE.write_text(page(lines, early), encoding="utf-8")
    return PAGE


def page(lines: Sequence[Line], early: Sequence[Line] = ()) -> str:
    """Return the page of each policy's latest lines."""
    tasks = dict.fromkeys(line["task"] for line in lines)
    claims = [_claim(*entry) for task in tasks for entry in _trained(lines, task)]
    sections = [part for task in tasks for part in _section(lines, task)]
    equal = [EQUAL_BYTES + "\n".join(row for task in tasks for row in _at_equal_bytes(lines, task)), ""]
    parts = [HEAD, section(early), LATE, *filter(None, claims), "", *equal, *sections, *_conditions(lines)]
    return "\n".join(parts)


def table(lines: Sequence[Line], task: str) -> list[str]:
    """Return the rows of a task's table."""
    rows = [
        COLUMNS,
        ("---",) * len(COLUMNS),
        *(_row(line, plain, runs) for line, plain, runs in _trained(lines, task)),
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def _trained(lines: Sequence[Line], task: str) -> list[tuple[Line, dict[int, Line], dict[int, Line]]]:
    """Return the line of each policy that at least two seeds trained, and the plain and its runs by seed.

    All three are of the latest code that trained the policy; `earlier` says whether there is a later one.
    """
    codes = by_code(lines, task)
    found: dict[str, tuple[Line, dict[int, Line], dict[int, Line]]] = {}
    for code, policies, runs in codes:
        plain = runs.get(PLAIN, {})
        for label, line in policies.items():
            own = runs.get(label, {})
            if min(len(plain), len(own)) > 1 and label not in found:
                found[label] = {**line, "earlier": code != codes[0][0]}, plain, own
    return list(found.values())


def _row(line: Line, plain: Mapping[int, Line], runs: Mapping[int, Line]) -> list[str]:
    mean = statistics.fmean(run["score"] for run in runs.values())
    score = f"{mean:.3f}" if line["relative"] else f"{mean:.2%}"
    bytes_ = [f"{line[name] / line['plain_peak']:.0%}" for name in ("peak", "saved")]
    if line["policy"] == PLAIN:
        return [PLAIN, *bytes_, "1.00", *("–",) * 3, str(len(runs)), score, *("–",) * 3]
    ends = [run["at_end"] for run in runs.values()]
    ratios = [
        _predicted(line),
        f"{line['at_start']:.2g}",
        f"{statistics.fmean(ends):.2g} (≤ {max(ends):.2g})",
    ]
    found = difference(line, plain, runs)
    label = line["policy"] + (f" in {line['budget']}" if line["budget"] else "") + "*" * line["earlier"]
    verdicts = [_yes(contains_zero(found)), _yes(is_within(found))]
    return [label, *bytes_, _step(line), *ratios, str(len(runs)), score, _shown(found), *verdicts]


def _step(line: Line) -> str:
    """Return the predicted step over the plain one; early lines have none."""
    step = line.get("step")
    return "–" if step is None else f"{step:.2f}"


def _shown(found: Interval) -> str:
    return f"{_percent(found.mean)} ({_percent(found.low)} … {_percent(found.high)})"


def contains_zero(interval: Interval) -> bool:
    return interval.low <= 0 <= interval.high


def is_within(interval: Interval) -> bool:
    """Return whether the whole interval is within the margin."""
    return interval.low >= -MARGIN and interval.high <= MARGIN


def _predicted(line: Line) -> str:
    """Return the predicted noise ratio; of settings that a profile does not price there is none."""
    return "–" if line["predicted"] is None else f"{line['predicted']:.2g}"


def _percent(value: float) -> str:
    return f"{100 * value:+.2f}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _section(lines: Sequence[Line], task: str) -> list[str]:
    trained = _trained(lines, task)
    first, plain, _ = trained[0]
    mean = statistics.fmean(run["score"] for run in plain.values())
    without = first.get("without") or "a guess that ignores the input"
    beside = f"{without} has {first['uninformed']:.3f}"
    about = f"{first['steps']} steps. Plain {first['metric']} {mean:.3f}; {beside}."
    return [f"## {first['title']}", "", about, "", *table(lines, task), ""]


def _claim(line: Line, plain: Mapping[int, Line], runs: Mapping[int, Line]) -> str:
    """Return what the seeds show of one policy, in words; nothing of the plain one."""
    if line["policy"] == PLAIN:
        return ""
    found = difference(line, plain, runs)
    largest = max(line["at_start"], *(run["at_end"] for run in runs.values()))
    if is_within(found):
        verdict = "as plain" if contains_zero(found) else "different from plain, by less than 1 %"
    elif contains_zero(found):
        verdict = "undecided: the interval contains zero, but is too wide"
    else:
        verdict = "different from plain"
    ratios = f"noise ratio {_predicted(line)} predicted, at most {largest:.2g} measured"
    return f"* {line['task']}, {line['policy']}: {ratios}. Learns **{verdict}**."


def _at_equal_bytes(lines: Sequence[Line], task: str) -> list[str]:
    """Return rows with the search beside rivals of the same bytes, of the latest code that trained both."""
    rows = []
    for searched, rival in itertools.product(SEARCHES, (GREEDY_AT, TWO_BITS)):
        for _, policies, runs in by_code(lines, task):
            own, other = (runs.get(label, {}) for label in (searched, rival))
            seeds = own.keys() & other.keys()
            if len(seeds) < 2:
                continue
            found = difference(policies[searched], other, own)
            if policies[searched]["relative"]:  # a lower loss is better
                found = Interval(-found.mean, -found.high, -found.low)
            verdict = "no" if contains_zero(found) else "yes" if found.mean > 0 else "yes, worse"
            steps = " and ".join(_step(policies[label]) for label in (searched, rival))
            names = (task, SEARCHES[searched], rival.partition(" at ")[0], str(len(seeds)))
            rows.append(f"| {' | '.join((*names, _shown(found), verdict, steps))} |")
            break
    return rows


def _conditions(lines: Sequence[Line]) -> list[str]:
    """Return when, where, with which versions and by which code the shown results were measured."""
    shown = {
        f"* {run['task']}, {run['date'][:10]}, code `{run['code']}`: {run['hardware']['cpu']} "
        f"({run['hardware']['capability']}), {run['hardware']['threads']} threads, "
        f"torch {run['versions']['torch']}"
        for task in dict.fromkeys(line["task"] for line in lines)
        for _, _, runs in _trained(lines, task)
        for run in runs.values()
    }
    return ["## Measured", "", *sorted(shown), ""]
