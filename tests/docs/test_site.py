"""The documentation site builds without a warning; its reference is that of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.reference import PAGE, page
from mesa_tune import api

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow("processes")
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
