"""What commands print when all is well: nothing on standard error, one JSON document, help of 80 columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mesa_tune.cli import COMMANDS
from tests.damage import MODEL, PROFILE, REPORT, SEARCH, VERIFY, Home, fresh

WALK = (f"{PROFILE} --force", SEARCH, VERIFY, REPORT, "report")
MEMORY = {"peak_bytes", "saved_bytes"}
PREDICTED = {*MEMORY, "gradient_error", "interval", "gradient_noise_ratio", "step_ms"}
KEYS = {
    "profile": "model fingerprint device autocast batch_size partial static_bytes saved_bytes peak_bytes "
    "step_ms",
    "search": "budget_bytes batch_size profiled_batch_size policy policy_path trials solver bound gap",
    "verify": "",
}
PARTS: dict[str, dict[str, set[str]]] = {
    "profile": {},
    "search": {"baseline": MEMORY, "predicted": PREDICTED, "measured": {"gradient_error"}},
    "verify": {"baseline": {*MEMORY, "step_ms"}, "policy": PREDICTED - {"interval"}, "predicted": PREDICTED},
}
ROWS = {
    "tensors": "id owner layers shape dtype bytes",
    "layers": "name tag index module shape dtype bytes own_bytes shared_with options call_ms",
}
OPTION = (
    "settings bytes tensor_error gradient_error errors interval provenance bias batches seeds "
    "encode_ms decode_ms screened"
)


def document(home: Home, command: str) -> dict[str, Any]:
    """The one document on standard output of `command --json`."""
    said = home.run(f"{command} --json")
    assert said.status == 0
    assert said.err.startswith("device: cpu")
    found: dict[str, Any] = json.loads(said.out)
    assert next(iter(found)) == "schema"
    return found


@pytest.mark.parametrize("command", [f"{PROFILE} --force", SEARCH, VERIFY], ids=lambda text: text.split()[0])
def test_documents_have_the_contracts_keys(command: str, home: Home) -> None:
    kind = command.partition(" ")[0]
    found = document(home, command)
    assert found["schema"] == f"mesa-tune.{kind}/1"
    assert set(KEYS[kind].split()) <= set(found)
    for name, keys in PARTS[kind].items():
        assert keys <= set(found[name])


def test_the_rows_of_a_profile_have_the_contracts_keys(home: Home) -> None:
    found = document(home, f"{PROFILE} --force")
    for name, keys in ROWS.items():
        assert found[name]
        assert all(set(row) == set(keys.split()) for row in found[name])
    options = [option for layer in found["layers"] for option in layer["options"]]
    assert options
    assert all(set(option) == set(OPTION.split()) for option in options)
    assert sum(layer["own_bytes"] for layer in found["layers"]) == found["saved_bytes"]


def test_a_search_without_a_study_measured_nothing(home: Home) -> None:
    fresh()()
    found = document(home, "search --budget 80% --trials 0")
    assert found["measured"] is None
    assert found["trials"] == 0
    assert found["policy"] == Path(found["policy_path"]).read_text().replace(
        checksum(found["policy_path"]), ""
    )


def checksum(path: str) -> str:
    return next(line for line in Path(path).read_text().splitlines(keepends=True) if "checksum" in line)


def test_what_a_model_file_prints_stays_out_of_the_document(home: Home) -> None:
    Path("model.py").write_text(
        MODEL.replace("def loss(model, batch):", "def loss(model, batch):\n    print('hello')")
    )
    said = home.run(f"{PROFILE} --run new --json")
    assert json.loads(said.out)["schema"] == "mesa-tune.profile/1"
    assert "hello" in said.err


@pytest.mark.parametrize("command", WALK)
def test_good_runs_begin_with_the_device_and_warn_of_nothing(command: str, home: Home) -> None:
    said = home.run(command)
    assert (said.status, said.err) == (0, "")
    assert said.out.startswith("device: cpu")


@pytest.mark.parametrize("command", WALK)
def test_quiet_runs_print_nothing(command: str, home: Home) -> None:
    said = home.run(f"{command} --quiet")
    assert (said.status, said.out, said.err) == (0, "", "")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_80_columns_and_whole_sentences(
    command: str, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = home.run(f"{command} --help")
    assert (said.status, said.err) == (0, "")
    assert max(map(len, said.out.splitlines())) <= 80
    assert "..." not in said.out.replace("]...", "]")


def test_a_warning_is_one_line(home: Home) -> None:
    Path("mesa.txt").write_text("layers: all\n")
    said = home.run(f"{VERIFY} --policy mesa.txt --force --quiet")
    assert said.status == 0
    assert said.err == "warning: " + said.err.partition("warning: ")[2]
    assert "mesa.txt:1: counts for nothing" in said.err
    assert len(said.err.splitlines()) == 1
