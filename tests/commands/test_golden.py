"""What commands print and write, beside files in `golden/`: tables of made-up profiles, at 80 columns.

`python -m tests.commands.test_golden` writes the files anew, after a change that is meant.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from mesa_tune import cli
from mesa_tune.commands import bytes_only, demo, diff, doctor, verify
from mesa_tune.commands import profile as profile_command
from mesa_tune.commands.common import Run
from mesa_tune.commands.memory import advising
from mesa_tune.commands.searching import fits, plan_text
from mesa_tune.errors import MesaTuneError, RunError, typed_options
from mesa_tune.measure.timing.duration import remaining_text
from mesa_tune.profiles.entries import NO_FORMULA, ExactEntry, LayerEntry
from mesa_tune.profiles.own_noise import AtCheckpoint
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.timeline.memory_model import Work
from mesa_tune.profiles.verification import GroupError, Measured, Ratio, Verification
from mesa_tune.search import Plan, search_policy
from mesa_tune.workload.model_file import file_fingerprint
from tests.builders import Patch
from tests.synthetic import COARSE, noisy, synthetic_profile

GOLDEN = Path(__file__).parent / "golden"
RUN = Run(Path("mesa-run"))
EARLY, LATE = AtCheckpoint("step20.pt", 1.2e-3, 0.93, 1.3e-3), AtCheckpoint("step300.pt", 2.4e-2, 0.41, None)
CHECKPOINTS = (EARLY, LATE)


@cache
def profiled() -> Profile:
    """The profile of a small model, with noise, checkpoints and a note."""
    profile = synthetic_profile(6)
    notes = ("out of memory at batch size 16: profiled at 8 instead",)
    profile = replace(noisy(profile, 0.9), interaction=())
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
    plain = Measured(profiled().peak_bytes, profiled().saved_bytes, 42.0)
    policy = Measured(predicted.peak_bytes + 1000, predicted.saved_bytes, 50.0)
    # The device is "cuda": without the note on glibc.
    return Verification(
        plain, policy, (1e-3, 2e-3), Ratio(1.19, 1.12, 1.31), predicted, "cuda", 8, torch="2.13.0", steps=5,
        gradient_noise_ratio=2e-3, checkpoints=CHECKPOINTS, worst_parameter="blocks.0.q.weight",
        worst_own_ratio=4e-2,
    )  # fmt: skip


def demonstrated() -> list[str]:
    row = {"name": "plain", "saved_bytes": 51_200_000, "peak_bytes": 57_200_000, "step_ms": 34.6}
    row |= {"step_ratio": None, "gradient_error": 0.0, "noise_ratio": 0.0, "accuracy": 0.967}
    searched = {"name": "searched", "step_ratio": 1.11, "noise_ratio": 1.1e-3, "saved_bytes": 16_800_000}
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


def observed() -> Profile:
    """The profile of a script's step: bytes alone."""
    profile, note = profiled(), "observed step 3 of the script, whose model is GPT"
    layers = tuple(replace(layer, options=()) for layer in profile.layers)
    exact = (ExactEntry("fft_rfft", "blocks.0", 262_144, NO_FORMULA),)
    return replace(
        profile, model=None, script="python train.py", notes=(note,), layers=layers, ties=(), exact=exact,
        checkpoints=(), gradient_noise=None, parameters=(),
    )  # fmt: skip


def only_bytes(limit: str | None = None) -> list[str]:
    request = bytes_only.Request("model.py", None, None, None, None, limit)
    rows = [
        fits.Fit("plain", 5_250_000_000, False, 5),
        fits.Fit("at 8 bits", 3_410_000_000, True, 9),
        fits.Fit("at 4 bits", 3_100_000_000, True, 10),
        fits.Fit(fits.SLICED, 2_110_000_000, True, 18),
        fits.Fit(fits.AGAIN, 1_800_000_000, True, 26),
    ]
    table = fits.fits_table(rows if limit else [], "cuda", limit)
    profile = replace(synthetic_profile(6, known=False), notes=profiled().notes)
    return bytes_only._lines(profile, request, RUN, table)


def verified_by_group() -> list[str]:
    groups = (
        GroupError("all", 1_025_226, 1.5e-3, 4.2e-3),
        GroupError("blocks.0", 12_608, 1.2e-3, 3.4e-3),
        GroupError("blocks.1", 12_608, 2.5e-4, 8.1e-4),
        GroupError("head", 1_000_010, None, None),
    )
    return verify.describe(replace(verified(), checkpoints=(), groups=groups), 40.0)


def printed(*arguments: str) -> list[str]:
    """Return the lines that a command prints."""
    output = io.StringIO()
    with redirect_stdout(output), pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", "80")
        assert cli.run(arguments) == 0
    return output.getvalue().splitlines()


@contextmanager
def machine(*, whole: bool) -> Iterator[None]:
    """Pretend a machine that has everything, or one that lacks all that `doctor` asks for."""

    def version(name: str) -> str:
        if not whole:
            raise PackageNotFoundError(name)
        return "1.2.3"

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(doctor, "version", version)
        patched.setattr("platform.python_version", lambda: "3.12.1")
        patched.setattr("platform.machine", lambda: "x86_64")
        patched.setattr("shutil.which", lambda name: "/usr/bin/c++" if whole else None)
        patched.setattr("torch.__version__", "2.13.0")
        patched.setattr("torch.version.cuda", "13.0")
        patched.setattr("torch.get_num_threads", lambda: 2)
        patched.setattr("mesa_tune.ops.LIBRARY", Path("clone/mesa_tune/_C.abi3.so"))
        patched.setattr("mesa_tune.ops.native", lambda device="cpu": whole)
        patched.setattr("mesa_tune.workload.workload.default_device", lambda: "cpu")
        for name in ("CXX", "MESA_TUNE_REFERENCE"):
            patched.delenv(name, raising=False)
        yield


def diagnosed(*, whole: bool) -> list[str]:
    with machine(whole=whole):
        return printed("doctor")


def save_profile(profile: Profile) -> None:
    RUN.folder.mkdir(exist_ok=True)
    profile.save(RUN.profile)


def save_plan(budget: str) -> None:
    plan = planned(budget)
    plan.save(RUN.plan)
    plan.policy.save(RUN.policy, force=True)


def of_file(**changes: object) -> Profile:
    """The profile with the fingerprint of the model file in the current folder."""
    return replace(profiled(), fingerprint=file_fingerprint(Path("model.py")), **changes)  # type: ignore[arg-type]


STATES: dict[str, Callable[[], object]] = {
    "no model file": lambda: None,
    "a model file": lambda: Path("model.py").write_text("BATCH_SIZE = 8\n"),
    "a script was observed": lambda: save_profile(observed()),
    "bytes only": lambda: save_profile(replace(synthetic_profile(2, known=False), model="model.py")),
    "interrupted": lambda: save_profile(of_file(partial=True)),
    "damaged": lambda: RUN.profile.write_text("{"),
    "the model file has changed": lambda: save_profile(replace(of_file(), fingerprint="0123")),
    "profiled": lambda: save_profile(of_file()),
    "planned, and the plain step fits": lambda: save_plan("110%"),
    "planned": lambda: save_plan("60%"),
    "verified": lambda: verified().save(RUN.verify),
    "reported": lambda: RUN.report.write_text(""),
}
"""How the run folder changes from one state to the next."""


def states() -> list[str]:
    """Return how the output of the bare command ends, state by state."""
    lines = []
    for name, change in STATES.items():
        change()
        output = printed()
        lines += [f"[{name}]", *output[len(output) - output[::-1].index("") :], ""]
    return lines[:-1]


def rounded(layer: LayerEntry) -> LayerEntry:
    """Return the layer with errors of two digits, which are the same on every machine."""
    options = (
        replace(
            option,
            gradient_error=float(f"{option.gradient_error:.1e}"),
            ratios=tuple(float(f"{ratio:.1e}") for ratio in option.ratios),
        )
        for option in layer.options
    )
    return replace(layer, options=tuple(options))


@cache
def small_run() -> tuple[Profile, Plan]:
    profile = synthetic_profile(1, grid=COARSE)
    profile = replace(profile, model="models/tiny_gpt.py", layers=tuple(map(rounded, profile.layers)))
    return profile, search_policy(profile, "70%")


def save_run(folder: Path, *, plan: bool = False, check: bool = False) -> None:
    """Write a run of the small model: its profile, and a plan and a verification if asked for."""
    folder.mkdir()
    profile, solved = small_run()
    profile.save(folder / "profile.json")
    if plan:
        solved.save(folder / "plan.json")
    if check:
        predicted = solved.predicted
        plain = Measured(profile.peak_bytes, profile.saved_bytes, 40.0)
        policy = Measured(predicted.peak_bytes + 1000, predicted.saved_bytes, 41.0)
        found = replace(verified(), baseline=plain, policy=policy, predicted=predicted, checkpoints=())
        found.save(folder / "verify.json")


def layers_file(form: str, path: str) -> list[str]:
    save_run(Path("run"), plan=True)
    printed("report", "run", "--format", form)
    return Path("run", path).read_text("utf-8").splitlines()


def comparison_file() -> list[str]:
    save_run(Path("plain"))
    save_run(Path("at-70"), plan=True)
    save_run(Path("verified"), plan=True, check=True)
    printed("report", "plain", "at-70", "verified", "--format", "md")
    return Path("plain/comparison.md").read_text("utf-8").splitlines()


DURATIONS = (11.0, 40.0, 1, 6), (12.0, 850.0, 4, 25), (120.0, 900.0, 7, 21)
TABLES: dict[str, Callable[[], list[str]]] = {
    "profile-duration": lambda: [remaining_text(*times) for times in DURATIONS],
    "profile": lambda: profile_command._lines(profiled(), RUN),
    "profile-optimizer": lambda: profile_command._lines(of_optimizer(), RUN),
    "profile-bytes-only": only_bytes,
    "profile-bytes-only-fits": lambda: only_bytes("4GB"),
    "profile-script": lambda: profile_command._lines(observed(), RUN),
    "search": lambda: plan_text.summary(planned("60%"), profiled(), RUN),
    "search-exact": lambda: plan_text.summary(planned("110%"), profiled(), RUN),
    "search-larger-batch": lambda: plan_text.summary(planned("60%", 64), profiled(), RUN),
    "search-budgets": lambda: plan_text.table([planned("50%"), planned("70%")], profiled(), RUN),
    "search-unreachable": lambda: refused("5%"),
    "search-unreachable-bytes": lambda: refused("100kB"),
    "verify": lambda: verify.describe(verified(), 40.0),
    "verify-by-group": verified_by_group,
    "diff": lambda: diff._lines(diff.compare(synthetic_profile(4), synthetic_profile(6, width=48))),
    "demo": demonstrated,
    "out-of-memory": without_memory,
    "doctor": lambda: diagnosed(whole=True),
    "doctor-missing": lambda: diagnosed(whole=False),
    "bare": printed,
    "bare-states": states,
}
FILES: dict[str, Callable[[], list[str]]] = {
    "layers.md": lambda: layers_file("md", "layers.md"),
    "layers.csv": lambda: layers_file("csv", "figures/layers.csv"),
    "comparison.md": comparison_file,
}
OUTPUT = {f"{name}.txt": make for name, make in TABLES.items()} | FILES


@pytest.mark.parametrize("name", OUTPUT)
def test_what_is_printed_is_as_in_its_file(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)  # a run in the clone, such as the demo's, would change what comes next
    monkeypatch.setattr("mesa_tune.search.reach._SECONDS", 60.0)  # also on a busy machine
    assert OUTPUT[name]() == (GOLDEN / name).read_text("utf-8").splitlines()


@pytest.mark.parametrize("name", TABLES)
def test_tables_have_80_columns(name: str) -> None:
    longest = max((GOLDEN / f"{name}.txt").read_text("utf-8").splitlines(), key=len)
    assert len(longest) <= 80, longest


def test_every_file_is_written_by_this_module() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(OUTPUT)


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, make in OUTPUT.items():
        os.chdir(tempfile.mkdtemp())
        (GOLDEN / name).write_text("\n".join(make()) + "\n", "utf-8")


if __name__ == "__main__":
    main()
