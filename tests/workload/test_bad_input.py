"""Bad input, end to end: three lines at most, status 1, no traceback, and the user's folder as it was.

Every case runs the real command line in a folder in which a model was profiled, searched and verified.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mesa_tune import cli
from tests.damage import (
    MODEL,
    PROFILE,
    REPORT,
    SEARCH,
    VERIFY,
    Case,
    Change,
    Home,
    Said,
    assert_message,
    cut,
    folder,
    fresh,
    gone,
    loss_line,
    model_end,
    model_file,
    policy_of_another_model,
    snapshot,
    sql,
    text,
    together,
    values,
)


def profiling(prepare: Change, *said: str) -> Case:
    """`profile`, and that nothing in the run is overwritten although it may be."""
    return Case(f"{PROFILE} --force", said, prepare)


def searching(prepare: Change, *said: str, options: str = "") -> Case:
    return Case(f"{SEARCH} {options}", said, prepare)


def verifying(prepare: Change, *said: str, options: str = "") -> Case:
    return Case(f"{VERIFY} {options}", said, prepare)


MY_STEP = """
class Mine(torch.optim.SGD):
    def step(self): return {}['x']
def optimizer(parameters): return Mine(parameters)
"""
SPARSE = """
def model(): return nn.Embedding(9, 4, sparse=True)
def batch(size): return torch.randint(9, (size,))
def loss(model, batch): return model(batch).mean()
"""
IN_PLACE = "out = model(batch[0]).sigmoid(); out.add_(1); return out.mean()"
TWO_DEVICES = "return (model(batch[0]) - torch.ones(64, device='meta')).mean()"
LAYER, META_LAYER = "nn.Linear(64, 64)", "nn.Linear(64, 64, device='meta')"
NO_MEMORY = "raise torch.OutOfMemoryError('CUDA out of memory')"

MODEL_FILES = {
    "missing": Case("profile nowhere.py", ("nowhere.py: no such file", "mesa-tune init")),
    "a configuration": Case(
        "profile config.json",
        ("config.json: is no Python file", "mesa-tune profile hf:config.json --bytes-only"),
        text("config.json", '{"model_type": "gpt2"}'),
    ),
    "syntax error": profiling(model_file("model()", "model(:"), "model.py:10: SyntaxError", "def model(:"),
    "without model": profiling(model_file("def model", "def net"), "model.py: no function model()"),
    "loss raises": profiling(loss_line("return {}['x']"), "model.py:19: loss() raised KeyError: 'x'"),
    "optimizer's step raises": profiling(model_end(MY_STEP), "model.py:25: optimizer.step() raised KeyError"),
    "AdamW's step raises": profiling(
        model_end(SPARSE), "model.py:24: the step of AdamW, as there is no optimizer(), raised", "sparse"
    ),
    "backward raises": profiling(loss_line(IN_PLACE), "model.py:18: the backward of loss()", "inplace"),
    "model on the wrong device": profiling(
        model_file(LAYER, META_LAYER), "model.py:10: model()", "0.weight is on the device meta", "on the CPU"
    ),
    "batch on the wrong device": profiling(
        model_file("32, 64)", "32, 64, device='meta')"), "model.py:14: batch()", "device meta", "on the CPU"
    ),
    "loss of two devices": profiling(loss_line(TWO_DEVICES), "model.py:19: loss() raised", "device="),
    "loss without the model": profiling(
        loss_line("return (0 * model(batch[0])).mean()"), "model.py:18: loss()", "gradient zero"
    ),
    "not one sample fits": profiling(loss_line(NO_MEMORY), "out of memory on cpu at batch size 1"),
}

OPTIONS = {
    "profile --batch-size 0": ("batch size 0", "--batch-size"),
    "profile --batch-size banana": ("--batch-size", "mesa-tune profile --help"),
    "profile --device tpu": ("device 'tpu'", "--device"),
    "profile --autocast int8": ("autocast 'int8'", "bfloat16"),
    "search": ("no budget", "--budget 6GB", "--smallest"),
    "search --budget banana": ("budget 'banana': not an amount", "6GB"),
    "search --budget 0": ("budget '0': must be above zero", "6GB"),
    "search --budget 1kB": ("budget 1.00 kB: not reachable", "static bytes", "smallest reachable peak"),
    "search --budget 64%": ("not reachable", "batch size 1 would fit: --budget"),
    "search --budget 80% --max-saved banana": ("max-saved 'banana'", "6GB"),
    "search --budget 24 MB": ("--budget 24 MB: ", "write --budget 24MB", '"24 MB" in quotes'),
    "search --max-saved=1.5 GiB": ("--max-saved 1.5 GiB: ", "write --max-saved 1.5GiB"),
    "profile model.py --bytes-only --fits 24 gb": ("--fits 24 gb: ", "write --fits 24gb"),
    "search --budget 80% --max-saved 1B": ("max-saved 1 B: unreachable", "fewest saved bytes"),
    "search --budget 80% --max-slowdown 0": ("max-slowdown 0",),
    "search --budget 80% --trials -1": ("trials -1", "0 solves"),
    "search --budget 80% --timeout 0": ("timeout 0",),
    "search --budget 80% --batch-size 0": ("batch size 0",),
    "search --budget 80% --storage banana://x": ("banana://x: the study", "check the URL"),
    "search --budget 80% --storage sqlite:///no/folder/x.db": ("sqlite:///no/folder/x.db: the study",),
    "verify --steps 0": ("--steps", "mesa-tune verify --help"),
    "verify --policy no.txt": ("no.txt: no such policy file", "mesa-tune search"),
    "report --format pdf": ("pdf", "html"),
    "init model.py": ("model.py: exists already", "--force"),
    "init model.py/more.py": ("model.py/more.py: cannot be written", "is a file"),
    f"{PROFILE} --run model.py": ("model.py: is a file", "--run DIR"),
    f"{PROFILE} --run model.py/below": ("model.py: is a file", "--run DIR"),
}

CHANGED = text("model.py", f"{MODEL}raise ValueError('it ran')\n")
STUDY, POLICY = "mesa-run/study.db", "mesa-run/policy.txt"
NEWER_STUDY = ("UPDATE alembic_version SET version_num = 'v9'", "UPDATE version_info SET schema_version = 99")
NO_PROFILE = ("profile.json: no such file", "`mesa-tune profile model.py`")
MISSPELT = text("other.txt", "on fc:\n    by_index: all\n    lvel: 4\n")
NOWHERE = text("other.txt", "on fc:\n    by_name: nowhere\n    level: 4\n")
OTHER = "--policy other.txt"

RUNS = {
    "search before profile": searching(gone("mesa-run"), *NO_PROFILE),
    "verify before profile": verifying(gone("mesa-run"), *NO_PROFILE),
    "report before profile": Case(REPORT, NO_PROFILE, gone("mesa-run")),
    "verify before search": verifying(fresh(), "policy.txt: no such file", "`mesa-tune search --budget 40%`"),
    "profile.json of somebody else": Case(PROFILE, ("--force",), text("mesa-run/profile.json", "mine")),
    "profile.json of other inputs": Case(f"{PROFILE} --batch-size 2", ("other inputs", "--force")),
    "profile.json of no batch": searching(values("mesa-run/profile.json", batch_size=0), "batch_size is 0"),
    "profile.json that lost its timeline's end": searching(
        values("mesa-run/profile.json", timeline={"batch_sizes": [4, 2]}), "damaged: 'static' is missing"
    ),
    "plan.json edited": searching(values("mesa-run/plan.json", gap=1.0), "was edited", "--force"),
    "policy.txt edited": searching(text(POLICY, "on fc:\n"), "policy.txt: was edited", "--force"),
    "verify.json edited": verifying(values("mesa-run/verify.json", steps=7), "was edited", "--force"),
    "report.json of somebody else": Case(REPORT, ("--force",), text("mesa-run/report.json", "{}")),
    "study.db cut": searching(cut(STUDY), "study.db: damaged", "--force"),
    "study.db of no database": searching(text(STUDY, "text\n" * 999), "study.db: damaged", "--force"),
    "study.db a folder": searching(folder(STUDY), "study.db: damaged"),
    "study.db of something else": searching(
        together(gone(STUDY), sql(STUDY, "CREATE TABLE customers (name TEXT)")), "not a study", "--force"
    ),
    "study.db of a newer Optuna": searching(sql(STUDY, *NEWER_STUDY), "study.db: the study", "--force"),
    "policy.txt of something else": verifying(fresh(text(POLICY, MODEL)), "policy.txt:2: no colon"),
    "policy.txt binary": verifying(text(POLICY, b"\x89PNG\r\n"), "policy.txt: not a policy", "search"),
    "policy misspelt": verifying(MISSPELT, "other.txt:3: unknown key 'lvel'", "'level'", options=OTHER),
    "policy of other layers": verifying(fresh(NOWHERE), "other.txt:2: no fc layer 'nowhere'", options=OTHER),
    "policy of another model": verifying(
        together(policy_of_another_model("other.txt"), fresh()),
        "other.txt:2: made for another model",
        "--force applies it anyway",
        options=OTHER,
    ),
    "search, model changed": searching(CHANGED, "model.py: changed since it was profiled", "--force"),
    "verify, model changed": verifying(CHANGED, "model.py: changed since it was profiled", "--force"),
    "search, model gone": searching(gone("model.py"), "model.py: no such file", "--trials 0"),
    "verify, model gone": verifying(gone("model.py"), "model.py: no such file", "mesa-tune profile"),
    "search, no model file": searching(
        fresh(values("mesa-run/profile.json", model=None)), "names no model file", "--trials 0"
    ),
    "verify, no model file": verifying(values("mesa-run/profile.json", model=None), "made in Python"),
}


@pytest.mark.parametrize("case", MODEL_FILES.values(), ids=list(MODEL_FILES))
def test_a_bad_model_file(case: Case, home: Home) -> None:
    home.assert_refused(case)


@pytest.mark.parametrize("command", OPTIONS)
def test_a_bad_option(command: str, home: Home) -> None:
    typed = command.replace("profile --", f"{PROFILE} --force --")
    home.assert_refused(Case(typed, OPTIONS[command], fresh()))


@pytest.mark.parametrize("case", RUNS.values(), ids=list(RUNS))
def test_a_bad_run(case: Case, home: Home) -> None:
    home.assert_refused(case)


def schema(path: str, version: int) -> str:
    return f"mesa-tune.{Path(path).stem}/{version}"


NO_JSON: dict[str, Callable[[str], Change]] = {
    "empty": lambda path: text(path, ""),
    "cut": cut,
    "binary": lambda path: text(path, b"\xff\xfe\0"),
    "a list": lambda path: text(path, "[]"),
    "nested deeply": lambda path: text(path, "[" * 100_000),
}
NO_DOCUMENT: dict[str, Callable[[str], Change]] = {
    "of something else": lambda path: text(path, '{"schema": "somebody.else/1"}'),
    "nothing but its schema": lambda path: text(path, json.dumps({"schema": schema(path, 1)})),
    "of a newer version": lambda path: values(path, schema=schema(path, 99)),
    "with a text for a number": lambda path: values(path, batch_size="4"),
    "with a NaN": lambda path: values(path, batch_size=float("nan")),
}


DAMAGES = NO_JSON | NO_DOCUMENT


@pytest.mark.parametrize(
    ("command", "name", "damage"),
    [
        *((SEARCH, "profile.json", damage) for damage in DAMAGES),
        *((VERIFY, "plan.json", damage) for damage in NO_DOCUMENT),
        *((REPORT, "verify.json", damage) for damage in NO_DOCUMENT),
        (VERIFY, "profile.json", "cut"),
        (REPORT, "profile.json", "cut"),
        (REPORT, "plan.json", "cut"),
    ],
    ids=lambda value: value.split()[0] if value in (SEARCH, VERIFY, REPORT) else value,
)
def test_a_damaged_document(command: str, name: str, damage: str, home: Home) -> None:
    path = f"mesa-run/{name}"
    remedy = f"make it again with `mesa-tune {'search' if name == 'plan.json' else Path(name).stem}"
    home.assert_refused(Case(command, (f"{name}: ", remedy), DAMAGES[damage](path)))


# What a message tells to type works


def test_a_budget_that_was_refused_for_the_batch_size(home: Home) -> None:
    fresh()()
    advised = re.search(r"would fit: (.*)", home.run("search --budget 64% --trials 0").err)
    assert advised
    assert home.run(f"search {advised[1]} --trials 0 --quiet") == Said(0, "", "")


def test_a_policy_of_another_model_is_applied_by_force(home: Home) -> None:
    policy_of_another_model("other.txt")()
    assert home.run(f"{VERIFY} {OTHER} --force --quiet") == Said(0, "", "")


def test_a_damaged_study_is_made_anew_by_force(home: Home) -> None:
    cut(STUDY)()
    assert home.run(f"{SEARCH} --force --quiet") == Said(0, "", "")


# As programs


def test_as_a_program(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("raises.py").write_text("\n" * 5 + "raise ValueError('no')\n")
    monkeypatch.setattr(sys, "argv", ["mesa-tune", "profile", "raises.py"])
    before = snapshot(home.path)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(cli.__file__.replace("cli.py", "__main__.py"), run_name="__main__")
    assert isinstance(ended.value.code, int)
    output = home.capture.readouterr()
    said = Said(ended.value.code, str(output.out), str(output.err))
    assert_message(said, ("raises.py:6: the model file raised",))
    assert snapshot(home.path) == before


@pytest.mark.slow("processes")
def test_the_example_with_a_policy_of_another_model(home: Home) -> None:
    example = Path(__file__).parents[2] / "examples" / "digits_vit.py"
    before = snapshot(home.path)
    command = [sys.executable, str(example), "--policy", POLICY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert_message(Said(done.returncode, done.stdout, done.stderr), ("made for another model",))
    assert snapshot(home.path) == before
