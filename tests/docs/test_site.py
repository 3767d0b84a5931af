"""The documentation site builds without a warning; its reference and schemas are those of the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mesa_tune as mt
from docs.reference import PAGE, page
from mesa_tune import api
from tests.synthetic import synthetic_profile

DOCS = Path(__file__).parents[2] / "docs"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "search_policy" in (tmp_path / "api.html").read_text("utf-8")


def test_the_reference_is_that_of_the_code() -> None:
    assert PAGE.read_text("utf-8") == page(), "write it again in the project's root: python -m docs.reference"


def test_every_public_name_is_in_the_reference() -> None:
    named = re.findall(r"^\.\. auto\w+:: (\w+)$", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(api.__all__)


def documents() -> dict[str, dict[str, Any]]:
    """Return a document of each kind."""
    profile = synthetic_profile()
    plan = mt.search_policy(profile, "60%", trials=0)
    work = mt.Workload(
        lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)),
        lambda n: torch.rand(n, 64),
        lambda model, batch: model(batch).square().mean(),
        batch_size=32,
    )
    check = mt.verify(work, mt.Policy.uniform(level=16), steps=1, seeds=1)
    return {"profile": profile.to_dict(), "plan": plan.to_dict(), "verify": check.to_dict()}


def test_documents_are_those_of_their_schemas() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for kind, document in documents().items():
        schema = json.loads((DOCS / "schemas" / f"{kind}.json").read_text("utf-8"))
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(json.loads(json.dumps(document)), schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, "batch_size": "32"}, schema)
