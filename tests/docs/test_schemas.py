"""JSON documents, printed by the real commands or found in their files, are those of docs/schemas."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.reference import DOCUMENTS
from mesa_tune.cli import COMMANDS, application
from mesa_tune.commands import demo
from tests.commands.scripts import InThisProcess
from tests.commands.test_golden import CHECKPOINTS, small_run, verified
from tests.damage import PROFILE, SEARCH, VERIFY, Home

jsonschema: Any = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[2]
SCHEMAS = {path.stem: json.loads(path.read_text("utf-8")) for path in (ROOT / "docs" / "schemas").iterdir()}
TRAIN = """
import torch
from model import batch, loss, model
net = model()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(3):
    value = loss(net, batch(4))
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
"""
PRINTED = {
    "profile": f"{PROFILE} --force --json",
    "profile, bytes only": "profile model.py --bytes-only --run bytes --json",
    "search": f"{SEARCH} --json",
    "search, exact": "search --budget 200% --trials 0 --run exact --profile mesa-run/profile.json --json",
    "search, several budgets": "search --budget 80%,90% --trials 0 --json",
    "verify": f"{VERIFY} --by-group --force --json",
    "report": "report --format md --json",
    "tree": "tree --json",
    "diff": "diff mesa-run mesa-run --json",
    "doctor": "doctor --json",
    "init": "init new.py --json",
}


def closed(schema: Any) -> Any:
    """Return the schema without leave for keys that it does not name."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: closed(value) for key, value in schema.items()}
    # What is required comes first: an error there is found without a look at long lists.
    return {"required": [], "additionalProperties": False, **parts} if "properties" in schema else parts


def validate(kind: str, document: dict[str, Any]) -> None:
    """Hold that the document has all that its schema requires, and nothing that the schema does not name."""
    schema = closed(SCHEMAS[kind])
    validator = jsonschema.Draft202012Validator(schema)
    assert not [error.message for error in validator.iter_errors(document)]
    for key in schema["required"]:
        error = next(validator.iter_errors({name: document[name] for name in document if name != key}))
        assert re.search("required|is not valid under", error.message)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_schemas_are_schemas(kind: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[kind])


def test_every_command_that_prints_a_document_has_a_schema() -> None:
    program: Any = typer.main.get_command(application())
    options = {name: program.commands[name].params for name in COMMANDS}
    printing = {name for name in COMMANDS if any("--json" in option.opts for option in options[name])}
    assert printing <= set(DOCUMENTS) == set(SCHEMAS)


def test_copies_of_a_definition_are_equal() -> None:
    plan, search = SCHEMAS["plan"], SCHEMAS["search"]["$defs"]["plan"]
    assert {**search["properties"], "schema": None} == {**plan["properties"], "schema": None}
    assert {*search["required"], "schema"} == set(plan["required"])
    predictions = [SCHEMAS[kind]["$defs"]["prediction"] for kind in ("plan", "search", "verify")]
    assert predictions[0] == predictions[1] == predictions[2]


@pytest.mark.parametrize("name", PRINTED)
def test_what_commands_print(name: str, home: Home) -> None:
    said = home.run(PRINTED[name])
    assert said.status == 0, said.err
    validate(name.partition(",")[0], json.loads(said.out))


def test_what_a_script_saves(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", InThisProcess)
    Path("train.py").write_text(TRAIN)
    said = home.run(f"profile --run script --json -- {shlex.quote(sys.executable)} train.py")
    document = json.loads(said.out)
    assert document["script"] is not None
    validate("profile", document)


def test_what_a_joined_study_prints(home: Home) -> None:
    journal = "--storage journal:study.journal"
    begun = home.run(f"search --budget 80% --trials 1 --force {journal}")
    study = next(line for line in begun.out.splitlines() if line.startswith("study ")).split()[1].rstrip(";")
    validate("join", json.loads(home.run(f"search --join {study} --trials 2 --json {journal}").out))


@pytest.mark.parametrize("fast", ["", "--fast"])
def test_what_the_demo_prints(fast: str, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    check, accuracy = verified(), None if fast else 0.95
    rows = [demo._row("plain", None, check, accuracy), demo._row("searched", check, check, accuracy)]
    monkeypatch.setattr(demo, "_run_command", lambda *_: None)
    monkeypatch.setattr(demo, "_measure", lambda *_, **__: rows)
    validate("demo", json.loads(home.run(f"demo {fast} --json").out))
    assert ("test accuracy" in home.run(f"demo {fast}").out) == (not fast)


@pytest.mark.parametrize("kind", ["profile", "plan", "verify"])
def test_files_of_a_run(kind: str, home: Home) -> None:
    document = json.loads((home.path / "mesa-run" / f"{kind}.json").read_text("utf-8"))
    validate(kind, document)
    with pytest.raises(jsonschema.ValidationError, match="'4' is not of type 'integer'"):
        jsonschema.validate({**document, "batch_size": "4"}, SCHEMAS[kind])


@pytest.mark.parametrize(
    ("runs", "file"), [("mesa-run", "report"), ("mesa-run other", "comparison")], ids=["one", "several"]
)
def test_tables_of_a_report(runs: str, file: str, home: Home) -> None:
    home.run("search --budget 90% --trials 0 --run other --profile mesa-run/profile.json")
    assert home.run(f"report {runs} --format json").status == 0
    validate("tables", json.loads((home.path / "mesa-run" / f"{file}.json").read_text("utf-8")))


def test_what_only_other_workloads_have() -> None:
    """Checkpoints, a plain step that does not fit, nothing predicted."""
    check = verified()
    profile, _ = small_run()
    unfit = replace(check.baseline, peak_bytes=None, saved_bytes=None, step_ms=None)
    validate("profile", json.loads(json.dumps(replace(profile, checkpoints=CHECKPOINTS).to_dict())))
    validate("verify", json.loads(json.dumps(check.to_dict())))
    unfitting = replace(check, baseline=unfit, step_ratio=None, predicted=None)
    validate("verify", json.loads(json.dumps(unfitting.to_dict())))
