"""`mesa-tune search` from end to end: files written, text, JSON, and every way it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mesa_tune import cli, estimate, profile
from mesa_tune.commands.searching.options import MAX_NOISE_RATIO
from mesa_tune.free_memory import free_memory, room_text
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.profile import Profile
from mesa_tune.search import Plan, objectives
from mesa_tune.units import format_bytes
from mesa_tune.workload.workload import Workload
from tests.builders import Capture, Patch
from tests.synthetic import COARSE, noisy, synthetic_profile

MODEL = """
import torch
from torch import nn

def model():
    hidden = [part for _ in range(5) for part in (nn.ReLU(), nn.Linear(128, 128))]
    return nn.Sequential(nn.Linear(64, 128), *hidden, nn.Linear(128, 10))

def batch(size):
    return torch.randn(size, 64), torch.randint(10, (size,))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

BATCH_SIZE = 1024
"""
OPTIONS = [LayerSettings(level=level) for level in (4, 16, 256)]
BUDGET = "80%"


@pytest.fixture(scope="module", name="profiled")
def _profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model file and a run in which it was profiled."""
    folder = tmp_path_factory.mktemp("profiled")
    (folder / "model.py").write_text(MODEL, "utf-8")
    workload = Workload.load(folder / "model.py", device="cpu")
    profile(workload, options=OPTIONS, seeds=2).save(folder / "profile.json")
    return folder


@pytest.fixture(name="folder", autouse=True)
def _folder(profiled: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """A fresh copy of the profiled folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    Path("mesa-run").mkdir()
    shutil.copy(profiled / "model.py", "model.py")
    moved = replace(Profile.load(profiled / "profile.json"), model=str(tmp_path / "model.py"))
    moved.save("mesa-run/profile.json")
    return tmp_path


SEQUENCES = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))

def model():
    return Model()

def batch(size, length):
    return torch.randn(size, length, 64), torch.randint(8, (size, length))

def loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

BATCH_SIZE = 8
LENGTH = 64
"""


@pytest.mark.slow("training")
def test_how_long_samples_may_be_under_the_smallest_plan(folder: Path, capsys: Capture) -> None:
    (folder / "model.py").write_text(SEQUENCES, "utf-8")
    workload = Workload.load(folder / "model.py", device="cpu")
    profile(workload, options=OPTIONS, seeds=2).save("mesa-run/profile.json")
    arguments = ("--max-noise-ratio", "inf", "--max-slowdown", "99", "--trials", "1")
    assert search("--max-length", "--budget", "60MB", *arguments) == 0
    table = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    longest = {
        cells[0]: int(cells[-1]) for cells in table if len(cells) > 3 and cells[-1].strip().isdecimal()
    }
    assert longest["this plan"] > longest["plain"] > 64
    policy = Plan.load("mesa-run/plan.json").policy
    longer = Workload.load(folder / "model.py", device="cpu", length=longest["this plan"])
    assert estimate(longer, policy).fits("60MB")


def test_the_longest_samples_need_memory_a_model_and_a_length(capsys: Capture) -> None:
    assert_refused(["--max-length"], capsys, ["max-length", "--budget 24GB"])
    assert_refused(["--max-length", "--budget", "1GB", "--trials", "0"], capsys, ["without --trials 0"])
    assert_refused(["--max-length", "--budget", "1GB"], capsys, ["samples have no length", "LENGTH = 2048"])


def files() -> set[str]:
    return {path.name for path in Path("mesa-run").iterdir()}


def search(*arguments: str) -> int:
    return cli.run(["search", *arguments])


def assert_refused(arguments: Sequence[str], capsys: Capture, words: Sequence[str]) -> None:
    """The command ends with status 1 and at most three lines that hold `words`; nothing is written."""
    before = {
        path: path.read_bytes() for path in Path().rglob("*") if path.is_file() and ".pyc" not in path.name
    }
    assert search(*arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.splitlines()) <= 3
    assert "Traceback" not in error
    for word in words:
        assert word in error
    assert {path: path.read_bytes() for path in before} == before
    assert not {"plan.json", "policy.txt"} & (files() - {path.name for path in before})


def test_the_profile_alone_gives_plan_and_policy(capsys: Capture) -> None:
    assert search("--budget", BUDGET, "--trials", "0") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "device: cpu"
    assert out[-4:] == [
        "    import mesa_tune as mt",
        '    mt.convert(model, mt.Policy.load("mesa-run/policy.txt"))',
        "",
        "next: mesa-tune verify",
    ]
    assert max(map(len, out)) <= 80
    plan, policy = Plan.load("mesa-run/plan.json"), Policy.load("mesa-run/policy.txt")
    assert policy == plan.policy
    assert plan.predicted.peak_bytes <= (plan.budget_bytes or 0)
    assert "study.db" not in files()


def test_a_study_measures_and_goes_on(capsys: Capture) -> None:
    assert search("--budget", BUDGET, "--trials", "2", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["schema"] == "mesa-tune.search/1"
    assert first["trials"] == 2
    assert first["policy_path"] == "mesa-run/policy.txt"
    assert 0 < first["measured"]["gradient_error"] < 1
    assert first["measured"]["gradient_error"] < 3 * first["predicted"]["gradient_error"]
    assert search("--budget", BUDGET, "--trials", "3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["trials"] == 3
    assert {"study.db", "plan.json", "policy.txt"} <= files()


def test_a_budget_that_the_plain_step_keeps_says_so(capsys: Capture) -> None:
    assert search("--budget", "6GB") == 0
    assert "plain step fits the budget" in capsys.readouterr().out
    assert Policy.load("mesa-run/policy.txt") == Policy()


def test_an_empty_policy_is_not_to_be_converted_to(capsys: Capture) -> None:
    assert search("--budget", "150%") == 0
    out = capsys.readouterr().out
    assert "mt.convert" not in out
    assert "mesa-run/policy.txt, which stores everything exactly: train as you are\n" in out
    assert out.endswith("next: mesa-tune report\n")


def test_a_budget_below_the_reachable(capsys: Capture) -> None:
    assert_refused(["--budget", "1kB"], capsys, ["static bytes", "smallest reachable peak"])
    assert files() == {"profile.json"}


def test_a_changed_model_file(capsys: Capture) -> None:
    Path("model.py").write_text(MODEL + "\n# tuned\n", "utf-8")
    assert_refused(["--budget", BUDGET], capsys, ["model.py", "changed since it was profiled"])
    assert search("--budget", BUDGET, "--trials", "0") == 0


def _text(path: Path) -> None:
    path.write_text("not a study\n" * 300, "utf-8")


def _header_only(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + b"\x07" * 4096)


@pytest.mark.parametrize("spoil", [_text, _header_only], ids=["foreign", "corrupt"])
def test_a_bad_study_is_refused_and_made_new_by_force(spoil: Callable[[Path], None], capsys: Capture) -> None:
    assert search("--budget", BUDGET, "--trials", "1", "--quiet") == 0
    spoil(Path("mesa-run/study.db"))
    assert_refused(["--budget", BUDGET, "--trials", "1"], capsys, ["study.db", "--force"])
    assert search("--budget", BUDGET, "--trials", "1", "--force") == 0


def test_a_study_that_was_there_before_is_left_alone(capsys: Capture) -> None:
    _text(Path("mesa-run/study.db"))
    assert_refused(["--budget", BUDGET, "--trials", "1"], capsys, ["study.db", "--force"])


def test_force_deletes_no_study_for_a_budget_that_fails(capsys: Capture) -> None:
    assert search("--budget", BUDGET, "--trials", "1", "--quiet") == 0
    assert_refused(["--budget", "1kB", "--force"], capsys, ["smallest reachable peak"])


def test_a_policy_edited_by_hand_is_kept(capsys: Capture) -> None:
    assert search("--budget", BUDGET, "--trials", "0", "--quiet") == 0
    path = Path("mesa-run/policy.txt")
    path.write_text(path.read_text("utf-8") + "\n# mine\n", "utf-8")
    assert_refused(["--budget", BUDGET, "--trials", "0"], capsys, ["policy.txt", "edited", "--force"])
    assert search("--budget", BUDGET, "--trials", "0", "--force") == 0
    assert "# mine" not in path.read_text("utf-8")


@pytest.mark.slow("training")
def test_a_profile_that_is_made_again_has_its_plan_made_again(capsys: Capture) -> None:
    path = Path("mesa-run/profile.json")
    before, predicted = Profile.load(path), []
    for slower in (1, 100):
        replace(before, step_ms=slower * before.plain_ms(before.batch_size)).save(path)
        assert search("--budget", BUDGET, "--trials", "1", "--quiet") == 0
        predicted.append(Plan.load("mesa-run/plan.json").predicted.step_ms or 0.0)
    assert predicted[1] > 10 * predicted[0]
    replace(before, fingerprint="0" * 64).save(path)
    assert_refused(["--budget", BUDGET, "--trials", "0"], capsys, ["other inputs", "workload", "--force"])


def test_a_refused_budget_says_what_differs_and_what_to_type(capsys: Capture) -> None:
    assert search("--budget", BUDGET, "--trials", "0", "--quiet") == 0
    assert search("--budget", "85%", "--trials", "0") == 1
    error = capsys.readouterr().err
    peak = Profile.load("mesa-run/profile.json").peak_bytes
    before, now = format_bytes(0.8 * peak), format_bytes(0.85 * peak)
    assert "other inputs" in error
    assert f"(budget {before}, now {now})" in error
    command = error.splitlines()[-1].removeprefix("mesa-tune ")
    assert cli.run([*command.split(), "--quiet"]) == 0
    kept, made = (Plan.load(Path(run) / "plan.json") for run in ("mesa-run", "mesa-run-85"))
    peak = kept.baseline.peak_bytes
    assert (kept.budget_bytes, made.budget_bytes) == (int(0.8 * peak), int(0.85 * peak))
    # The new run goes on by itself: it has the profile.
    assert cli.run(["verify", "--run", "mesa-run-85", "--steps", "1", "--seeds", "1", "--quiet"]) == 0
    assert search("--budget", "85%", "--trials", "0", "--run", "mesa-run-85", "--quiet") == 0


def test_the_same_budget_typed_in_another_way_is_the_same_budget() -> None:
    assert search("--budget", BUDGET, "--trials", "0", "--quiet") == 0
    budget = Plan.load("mesa-run/plan.json").budget_bytes
    assert search("--budget", str(budget), "--batch-size", "1024", "--trials", "0", "--quiet") == 0


def test_a_profile_that_is_elsewhere(capsys: Capture) -> None:
    Path("else").mkdir()
    Path("else/profile.json").write_text("mine")
    elsewhere = ["--profile", "mesa-run/profile.json", "--run", "else"]
    assert_refused(["--budget", BUDGET, *elsewhere], capsys, ["else/profile.json", "--force"])
    nowhere = ["--profile", "nowhere/profile.json"]
    assert_refused(["--budget", BUDGET, *nowhere], capsys, ["nowhere/profile.json: no such file"])


@pytest.mark.slow("training")
def test_verify_follows_a_plan_that_was_replaced() -> None:
    verify = ["verify", "--steps", "1", "--seeds", "1", "--quiet"]
    assert search("--budget", BUDGET, "--trials", "0", "--quiet") == 0
    assert cli.run(verify) == 0
    assert search("--budget", "85%", "--trials", "0", "--force", "--quiet") == 0
    assert cli.run(verify) == 0
    assert cli.run(["report", "--quiet"]) == 0


PLAIN_LOSS = "return nn.functional.cross_entropy(model(batch[0]), batch[1])"
LOSS = (
    f"{PLAIN_LOSS} + (model(batch[0]) @ WIDE).softmax(1).square().sum()\n\n\nWIDE = torch.randn(10, 2048)\n"
)


@pytest.mark.slow("training")
def test_a_policy_for_the_loss_is_put_around_the_loss(capsys: Capture) -> None:
    Path("model.py").write_text(MODEL.replace(PLAIN_LOSS, LOSS))
    profile(Workload.load("model.py", device="cpu"), options=OPTIONS).save("mesa-run/profile.json")
    assert search("--budget", "70%", "--trials", "0") == 0
    lines = [line.removeprefix("    ") for line in capsys.readouterr().out.splitlines()]
    assert lines[lines.index("import mesa_tune as mt") : -2] == [
        "import mesa_tune as mt",
        'policy = mt.Policy.load("mesa-run/policy.txt")',
        "mt.convert(model, policy)",
        "...",
        "with mt.compress_saved(policy):  # the loss, too",
        "    loss = ...",
    ]
    assert cli.run(["report", "--quiet"]) == 0
    assert "with mt.compress_saved(policy):" in Path("mesa-run/report.html").read_text("utf-8")


def test_out_of_memory_says_what_to_do(monkeypatch: Patch, capsys: Capture) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("mesa_tune.measure.errors.joint_error.JointError.errors", fail)
    assert_refused(["--budget", BUDGET, "--trials", "2"], capsys, ["out of memory", "--batch-size 512"])


def test_a_profile_made_in_python_is_solved_without_a_model(capsys: Capture) -> None:
    synthetic_profile(2, grid=COARSE).save("mesa-run/profile.json")
    assert_refused(["--budget", "60%"], capsys, ["names no model file", "--trials 0"])
    assert search("--budget", "60%", "--trials", "0", "--batch-size", "20", "--max-saved", "90%") == 0
    assert "at batch size 20 (profiled at 8)" in capsys.readouterr().out


def noisy_run() -> Profile:
    made = replace(noisy(synthetic_profile(2, grid=COARSE)), interaction=())
    made.save("mesa-run/profile.json")
    return made


def test_the_terminal_says_which_objective_held(capsys: Capture) -> None:
    noisy_run()
    for options, words in (
        (["--budget", "60%"], "objective  time within noise ratio 0.005; no plan of the settings tried"),
        (["--budget", "60%", "--objective", "error"], "objective  error; no plan of the settings tried errs"),
        (["--smallest"], "objective  memory within noise ratio 0.005; "),
        (["--budget", "60%", "--max-noise-ratio", "1e-12"], "objective  error, because no plan was found"),
    ):
        assert search(*options, "--trials", "0", "--force") == 0
        out = capsys.readouterr().out
        assert words in out
        assert max(map(len, out.splitlines())) <= 80
    assert "objective error" in Path("mesa-run/policy.txt").read_text("utf-8")


def test_several_budgets_have_a_table_and_files_of_their_own(capsys: Capture) -> None:
    noisy_run()
    several = ["--budget", "80%,60%, 500kB", "--trials", "0"]
    assert search(*several) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("wrote mesa-run/policy-") == 3
    labels = ("80percent", "60percent", "500kB")
    assert {Path(name).stem for name in files()} >= {
        f"{kind}-{each}" for kind in ("plan", "policy") for each in labels
    }
    assert not {"plan.json", "policy.txt"} & files()
    assert search(*several, "--json") == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    saved = [Plan.load(f"mesa-run/plan-{label}.json").budget_bytes for label in labels]
    assert [plan["budget_bytes"] for plan in plans] == saved


def test_what_is_free_can_be_the_budget(capsys: Capture, monkeypatch: Patch) -> None:
    made = noisy_run()
    free = int(0.8 * made.peak_bytes)
    monkeypatch.setattr("mesa_tune.free_memory._available", lambda: free)
    monkeypatch.setattr("mesa_tune.free_memory._cgroup_bytes", list)
    assert search("--budget", "auto", "--trials", "0") == 0
    assert f"budget auto: {format_bytes(free)} of memory available, less 10%" in capsys.readouterr().out
    assert Plan.load("mesa-run/plan.json").budget_bytes == int(0.9 * free)
    monkeypatch.setattr("mesa_tune.free_memory._cgroup_bytes", lambda: [(free - 1000, "left by it")])
    assert free_memory("cpu") == (free - 1000, "left by it")


def test_the_largest_batch_is_planned_for(capsys: Capture) -> None:
    noisy_run()
    assert search("--budget", "100%", "--max-batch", "--trials", "0") == 0
    plan = Plan.load("mesa-run/plan.json")
    out = capsys.readouterr().out
    assert f"at batch size {plan.batch_size} (profiled at 8)" in out
    assert plan.batch_size > 8
    assert plan.objective == "time"
    assert "room" not in out
    assert search("--budget", "1GB", "--max-batch", "--trials", "0", "--force") == 0
    assert f"room for what no prediction has: {room_text('cpu')}" in capsys.readouterr().out


def test_layers_are_pinned_and_stores_forbidden(capsys: Capture) -> None:
    noisy_run()
    pins = ["--pin", "blocks.0.*: exact", "--pin", "blocks.1.fc2: level 4"]
    arguments = ["--budget", "75%", "--trials", "0", "--forbid", "derive,tile", "--only", "level"]
    assert search(*arguments, *pins) == 0
    policy = Policy.load("mesa-run/policy.txt")
    assert policy.settings("fc", 0, "blocks.0.fc2").exact
    assert policy.settings("fc", 7, "blocks.1.fc2").level == 4
    capsys.readouterr()
    assert_refused([*arguments, "--pin", "blocks.0: levl 4"], capsys, ["levl", "'level'"])
    assert_refused(["--trials", "0"], capsys, ["no budget", "--smallest"])


def test_ctrl_c_writes_the_solved_plan(monkeypatch: Patch, capsys: Capture) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("mesa_tune.measure.errors.joint_error.JointError.errors", interrupted)
        assert search("--budget", BUDGET, "--trials", "2") == 130
    out = capsys.readouterr().out
    assert "wrote mesa-run/policy.txt as solved; the same command continues the study" in out
    solved = Plan.load("mesa-run/plan.json")
    assert (solved.trials, solved.measured) == (0, None)
    assert Policy.load("mesa-run/policy.txt") == solved.policy
    assert search("--budget", BUDGET, "--trials", "2", "--quiet") == 0
    confirmed = Plan.load("mesa-run/plan.json")
    assert confirmed.trials == 2
    monkeypatch.setattr("mesa_tune.search.study.worker.Worker.run", interrupted)
    assert search("--budget", BUDGET, "--trials", "3") == 130
    assert Plan.load("mesa-run/plan.json") == confirmed


def test_a_study_is_joined(capsys: Capture, tmp_path: Path) -> None:
    journal = ["--storage", f"journal:{tmp_path}/study.journal"]
    assert search("--budget", BUDGET, "--trials", "1", *journal) == 0
    out = capsys.readouterr().out
    name = (
        next(line for line in out.splitlines() if line.startswith("study mesa-tune-")).split()[1].rstrip(";")
    )
    assert search("--join", name, "--trials", "2", "--json", *journal) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": "mesa-tune.join/1",
        "study": name,
        "trials": 2,
        "own": 1,
    }
    for arguments, words in (
        (["--join", "nobody", *journal], ["no such study", name]),
        (["--join", name], ["no --storage"]),
        (["--join", name, "--storage", "study.db"], ["study.db", "one worker only"]),
        (["--join", name, "--budget", "4GB", "--pin", "x: exact", *journal], ["--budget, --pin", "its own"]),
        (
            ["--budget", BUDGET, "--workers", "2", "--storage", "study.db"],
            ["study.db", "one worker only", "journal:PATH"],
        ),
        (["--budget", BUDGET, "--workers", "0", *journal], ["workers 0"]),
        (["--join", name, "--storage", "journal:nowhere"], ["nowhere", "no such file"]),
    ):
        assert_refused(arguments, capsys, words)
    changed = replace(Profile.load("mesa-run/profile.json"), step_ms=1e3)
    changed.save("mesa-run/profile.json")
    assert_refused(["--join", name, *journal], capsys, ["another profile of this model", "copy"])


def test_the_default_ratio_is_that_of_search_policy() -> None:
    assert MAX_NOISE_RATIO == objectives.MAX_NOISE_RATIO
