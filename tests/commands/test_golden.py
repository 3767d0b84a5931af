"""What commands print, beside files in `golden/`: the tables of made-up profiles, at 80 columns.

`python -m tests.commands.test_golden` writes the files anew, after a change that is meant.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from mesa_tune.commands import bytes_only, demo, diff, plan_text, verify
from mesa_tune.commands import profile as profile_command
from mesa_tune.commands.common import Run
from mesa_tune.commands.memory import advising
from mesa_tune.errors import MesaTuneError, RunError, typed_options
from mesa_tune.profiler.errors.at_checkpoints import AtCheckpoint
from mesa_tune.profiler.memory.memory_model import Work
from mesa_tune.profiler.profile import Profile
from mesa_tune.profiler.timing.duration import remaining_text
from mesa_tune.profiler.verification import Measured, Ratio, Verification
from mesa_tune.search import Plan, search_policy
from tests.synthetic import synthetic_profile

GOLDEN = Path(__file__).parent / "golden"
RUN = Run(Path("mesa-run"))
CHECKPOINTS = (
    AtCheckpoint("step20.pt", 1.2e-3, 0.93, 1.3e-3),
    AtCheckpoint("step300.pt", 2.4e-2, 0.41, None),
)


@cache
def profiled() -> Profile:
    """The profile of a small model, with noise, checkpoints and a note."""
    profile = synthetic_profile(6)
    norms = (1.0,) * len(profile.layers[0].options[0].errors)
    notes = ("out of memory at batch size 16: profiled at 8 instead",)
    profile = replace(profile, gradient_noise=0.9, gradient_scale=1.0, gradient_norms=norms)
    return replace(profile, model="model.py", notes=notes, checkpoints=CHECKPOINTS)


def of_optimizer() -> Profile:
    """The same profile with a peak in the optimizer's step."""
    profile = profiled()
    large = (9_000_000, 9_000_000)
    slots = (*profile.timeline.slots[:-1], replace(profile.timeline.slots[-1], once=Work.of(large, large)))
    timeline = replace(profile.timeline, slots=slots)
    return replace(profile, timeline=timeline, peak_bytes=timeline.peak_bytes({}), notes=(), checkpoints=())


@cache
def planned(budget: str, batch_size: int | None = None) -> Plan:
    return search_policy(profiled(), budget, batch_size=batch_size).at(f"mesa-run/policy-{budget[:-1]}.txt")


def verified() -> Verification:
    predicted = planned("60%").predicted
    return Verification(
        Measured(profiled().peak_bytes, profiled().saved_bytes, 42.0),
        Measured(predicted.peak_bytes + 1000, predicted.saved_bytes, 50.0),
        gradient_errors=(1e-3, 2e-3),
        step_ratio=Ratio(1.19, 1.12, 1.31),
        predicted=predicted,
        device="cuda",  # without the note on glibc
        batch_size=8,
        torch="2.13.0",
        steps=5,
        gradient_noise_ratio=2e-3,
        checkpoints=CHECKPOINTS,
    )


def demonstrated() -> list[str]:
    row = {"name": "plain", "saved_bytes": 51_200_000, "peak_bytes": 57_200_000, "step_ms": 34.6}
    row |= {"step_ratio": None, "gradient_error": 0.0, "accuracy": 0.967}
    searched = {"name": "searched", "step_ratio": 1.11, "gradient_error": 1.1e-2, "saved_bytes": 16_800_000}
    return demo.table([row, {**row, **searched}])


def without_memory() -> list[str]:
    try:
        with advising(profiled(), 64, {}, lambda fits: f"`mesa-tune profile model.py --batch-size {fits}`"):
            raise RunError("out of memory") from MemoryError()
    except RunError as error:
        return str(error).splitlines()


def refused(budget: str, batch_size: int | None = None) -> list[str]:
    try:
        with typed_options():
            search_policy(profiled(), budget, batch_size=batch_size)
    except MesaTuneError as error:
        return str(error).splitlines()
    raise AssertionError(budget)


TABLES: dict[str, Callable[[], list[str]]] = {
    "profile-duration": lambda: [
        remaining_text(11.0, 40.0, 1, 6),
        remaining_text(12.0, 850.0, 4, 25),
        remaining_text(120.0, 900.0, 7, 21),
    ],
    "profile": lambda: profile_command._lines(profiled(), RUN),
    "profile-optimizer": lambda: profile_command._lines(of_optimizer(), RUN),
    "profile-bytes-only": lambda: bytes_only._lines(
        profiled(), bytes_only.Request("model.py", None, None, None, None), RUN, []
    ),
    "search": lambda: plan_text.summary(planned("60%"), profiled(), RUN),
    "search-exact": lambda: plan_text.summary(planned("110%"), profiled(), RUN),
    "search-larger-batch": lambda: plan_text.summary(planned("60%", 64), profiled(), RUN),
    "search-budgets": lambda: plan_text.table([planned("50%"), planned("70%")], profiled(), RUN),
    "search-unreachable": lambda: refused("5%"),
    "search-unreachable-bytes": lambda: refused("100kB"),
    "verify": lambda: verify.describe(verified(), 40.0),
    "diff": lambda: diff._lines(diff.compare(synthetic_profile(4), synthetic_profile(6, width=48))),
    "demo": demonstrated,
    "out-of-memory": without_memory,
}


@pytest.mark.parametrize("name", TABLES)
def test_what_is_printed_is_as_in_its_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a run in the clone, such as the demo's, would change what comes next
    lines = TABLES[name]()
    assert lines == (GOLDEN / f"{name}.txt").read_text("utf-8").splitlines()


@pytest.mark.parametrize("name", TABLES)
def test_tables_have_80_columns(name: str) -> None:
    longest = max((GOLDEN / f"{name}.txt").read_text("utf-8").splitlines(), key=len)
    assert len(longest) <= 80, longest


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    os.chdir(tempfile.mkdtemp())
    for name, make in TABLES.items():
        (GOLDEN / f"{name}.txt").write_text("\n".join(make()) + "\n", "utf-8")


if __name__ == "__main__":
    main()
