"""What commands print when all is well: nothing on standard error, one JSON document, help of 80 columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mesa_tune.cli import COMMANDS
from tests.builders import Patch
from tests.damage import MODEL, PROFILE, REPORT, SEARCH, VERIFY, Home, fresh

WALK = (f"{PROFILE} --force", SEARCH, VERIFY)


@pytest.mark.parametrize("command", WALK, ids=lambda text: text.split()[0])
def test_a_document_stands_alone_on_standard_output(command: str, home: Home) -> None:
    """What is in it: tests/docs/test_schemas.py."""
    said = home.run(f"{command} --json")
    assert said.status == 0
    assert said.err.startswith("device: cpu")
    assert next(iter(json.loads(said.out))) == "schema"


def test_layers_of_a_profile_share_its_bytes_and_options_say_how_they_were_measured(home: Home) -> None:
    document = json.loads(home.run(f"{PROFILE} --force --json").out)
    layers = document["layers"]
    assert sum(layer["own_bytes"] for layer in layers) == document["saved_bytes"]
    assert all("call_ms" in layer for layer in layers)
    options = [option for layer in layers for option in layer["options"]]
    assert options
    assert all({"bias", "ratios", "screened"} <= set(option) for option in options)


def test_a_search_without_a_study_measured_nothing(home: Home) -> None:
    fresh()()
    found = json.loads(home.run("search --budget 80% --trials 0 --json").out)
    assert (found["measured"], found["trials"]) == (None, 0)
    lines = Path(found["policy_path"]).read_text().splitlines(keepends=True)
    assert found["policy"] == "".join(line for line in lines if "checksum" not in line)


def test_what_a_model_file_prints_stays_out_of_the_document(home: Home) -> None:
    Path("model.py").write_text(
        MODEL.replace("def loss(model, batch):", "def loss(model, batch):\n    print('hello')")
    )
    said = home.run(f"{PROFILE} --run new --json")
    assert json.loads(said.out)["schema"] == "mesa-tune.profile/3"
    assert "hello" in said.err


@pytest.mark.parametrize(("command", "quiet"), [*((each, each) for each in WALK), ("report", REPORT)])
def test_good_runs_begin_with_the_device_and_warn_of_nothing_and_quiet_ones_are_silent(
    command: str, quiet: str, home: Home
) -> None:
    said = home.run(f"{quiet} --quiet")
    assert (said.status, said.out, said.err) == (0, "", "")
    said = home.run(command)
    assert (said.status, said.err) == (0, "")
    assert said.out.startswith("device: cpu")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_80_columns_and_whole_sentences(command: str, home: Home, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = home.run(f"{command} --help")
    assert (said.status, said.err) == (0, "")
    assert max(map(len, said.out.splitlines())) <= 80
    assert "..." not in said.out.replace("]...", "]")
    assert not command or "--debug" in said.out


def test_a_warning_is_one_line(home: Home) -> None:
    Path("mesa.txt").write_text("layers: all\n")
    said = home.run(f"{VERIFY} --policy mesa.txt --force --quiet")
    assert said.status == 0
    assert said.err == "warning: " + said.err.partition("warning: ")[2]
    assert "mesa.txt:1: counts for nothing" in said.err
    assert len(said.err.splitlines()) == 1
