"""An integration whose framework is not installed names the package; mesa-tune itself needs none of them."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import mesa_tune as mt

FRAMEWORKS = ("transformers", "lightning", "accelerate")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_error_names_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (name, f"{name}.pytorch"):  # the second is what Lightning's is imported from
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"mesa_tune.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=f"pip install {name}") as caught:
        importlib.import_module(f"mesa_tune.integrations.{name}")
    assert isinstance(caught.value, mt.MesaTuneError)


def test_importing_mesa_tune_imports_no_framework() -> None:
    code = "import sys, mesa_tune.api, mesa_tune.integrations; print({*sys.argv[1:]} & sys.modules.keys())"
    run = [sys.executable, "-c", code, *FRAMEWORKS]
    result = subprocess.run(run, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
