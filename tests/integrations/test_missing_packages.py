"""An integration whose framework is not installed names the package."""

from __future__ import annotations

import importlib
import sys

import pytest

import mesa_tune as mt


@pytest.mark.parametrize("name", ["transformers", "lightning", "accelerate"])
def test_the_error_names_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (name, f"{name}.pytorch"):  # the second is what Lightning's is imported from
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"mesa_tune.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=f"pip install {name}") as caught:
        importlib.import_module(f"mesa_tune.integrations.{name}")
    assert isinstance(caught.value, mt.MesaTuneError)
