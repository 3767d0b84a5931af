"""docs/functions.md says what the tables say, and what it says of PyTorch is what autograd saves."""

from __future__ import annotations

import pytest
import torch

from docs.functions import NOTHING, PAGE, page, rows, saved_by_pytorch, taken
from mesa_tune.formulas.table import ROUTES
from tests.functional_cases import CASES

REMEDY = "docs/functions.md is out of date; write it again in the project's root: python -m docs.functions"


def test_the_page_is_what_the_tables_say() -> None:
    written = PAGE.read_text("utf-8").splitlines()
    generated = page().splitlines()
    assert [line for line in generated if line not in written] == [], REMEDY
    assert written == generated, REMEDY


def test_every_routed_function_stands_on_the_page_with_a_sample_call() -> None:
    listed = {function for row in rows() for function in row.functions}
    assert listed == set(ROUTES)
    assert [row.name for row in rows() if not row.cases()] == [], "add a case to tests/functional_cases.py"


def test_samples_name_the_formula_that_they_take() -> None:
    assert taken(CASES["linear"]) == ["linear"]
    assert taken(CASES["addmm"]) == ["matmul_plus"]


def test_what_pytorch_saves_is_named_by_argument() -> None:
    assert saved_by_pytorch(CASES["linear"]) == ["`input`", "`weight`"]
    assert saved_by_pytorch(CASES["relu"]) == ["the output"]
    assert saved_by_pytorch(CASES["cross_entropy"])[0] == "float32 of the first argument's size"


@pytest.mark.parametrize("name", NOTHING)
def test_a_function_that_needs_nothing_saves_no_floats(name: str) -> None:
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        NOTHING[name]()
    assert [tensor.shape for tensor in saved if tensor.is_floating_point()] == []
