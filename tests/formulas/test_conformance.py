"""Every function and layer passes the rules; one of each kind does in every situation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mesa_tune import notice
from mesa_tune.formulas.table import FORMULAS, ROUTES
from tests.builders import conversion
from tests.conformance import rules
from tests.conformance.cases import CASES, Case, case
from tests.conformance.running import PLAIN, SITUATIONS, Situation, applies, build, converted, step

KINDS = (
    *("Linear", "Conv2d", "BatchNorm2d", "LayerNorm", "GELU", "relu_", "SwiGLU", "normalize", "Dropout"),
    *("MaxPool2d", "Softmax", "softmax-matmul", "attention", "MultiheadAttention-weights", "cross_entropy"),
)
"""A case of each kind: what is true of one is true of its like, where formulas have no part in it."""

by_case = pytest.mark.parametrize("case", CASES, ids=lambda each: each.id)
by_kind = pytest.mark.parametrize("case", [case(name) for name in KINDS], ids=KINDS)
lossy = pytest.mark.parametrize("case", [c for c in CASES if not c.lossless], ids=lambda each: each.id)
BY_ID = {situation.id: situation for situation in SITUATIONS}


def in_situations(of_all: set[str], of_kinds: set[str]) -> pytest.MarkDecorator:
    """Every case in the situations `of_all`, and one of each kind in those `of_kinds`."""
    pairs = [
        pytest.param(each, situation, id=f"{each.id}-{situation.id}")
        for each in CASES
        for situation in SITUATIONS
        if situation.id in (of_all | of_kinds if each.id in KINDS else of_all) and applies(each, situation)
    ]
    return pytest.mark.parametrize(("case", "situation"), pairs)


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    """A function that passes must not have been refused."""
    notice._given.clear()
    yield
    assert not [text for text in notice._given if "uncompressed" in text]


OF_FORMULAS = {"train", "eval", "autocast", "frozen-weight", "frozen-input"}
OF_LAYOUTS = {"non-contiguous", "zero-batch", "in-place-after"}


@in_situations(OF_FORMULAS | OF_LAYOUTS, set(BY_ID))
def test_rule_1_forward_is_exact_and_gradient_near(case: Case, situation: Situation) -> None:
    rules.check_rule_1(case, situation)


@by_kind
def test_formula_is_that_of_pytorch(case: Case) -> None:
    """Of all functions: `tests/formulas/test_functional_all.py`."""
    rules.check_formula(case)


@in_situations(OF_FORMULAS, {"bfloat16", "on-the-batch"})
def test_rule_2_never_keeps_more_than_pytorch(case: Case, situation: Situation) -> None:
    rules.check_rule_2(case, situation)


def test_rule_3_one_copy_for_all_that_share_settings() -> None:
    rules.check_rule_3_once()


def test_rule_3_never_a_stale_copy() -> None:
    rules.check_rule_3_never_stale()


@by_case
def test_rules_4_and_9_several_forwards_and_several_backwards(case: Case) -> None:
    rules.check_rule_4(case)
    rules.check_rule_9(case)


@pytest.mark.parametrize("levels", [2, 3, 4, 16, 200, 256])
def test_rule_5_clamps(levels: int) -> None:
    rules.check_rule_5(levels)


UNBIASED = ["Linear", "Conv2d", "matmul", "LayerNorm", "BatchNorm2d"]
"""Those whose gradient is linear in what they keep: only there unbiased noise makes an unbiased gradient."""


@pytest.mark.parametrize("name", UNBIASED)
def test_rule_6_unbiased(name: str) -> None:
    rules.check_rule_6_unbiased(case(name))


@pytest.mark.parametrize("name", [name for name in KINDS if not case(name).lossless])
def test_rule_6_noise_follows_seed_and_forward(name: str) -> None:
    rules.check_rule_6_seeds(case(name))


@pytest.mark.parametrize(
    "name", ["checkpoint", "checkpoint-reentrant", "checkpoint-outside", "checkpoint-outside-reentrant"]
)
def test_rule_6_noise_is_new_each_step_under_checkpointing(name: str) -> None:
    rules.check_rule_6_in(BY_ID[name])


@lossy
def test_rule_7_statistics_agree_with_data(case: Case) -> None:
    rules.check_rule_7(case)


@by_kind
def test_rule_8_is_invisible(case: Case) -> None:
    rules.check_rule_8(case)


@by_case
def test_case_reaches_its_tags(case: Case) -> None:
    model, x = build(case)
    coded = converted(model)
    step(coded, x, PLAIN)
    found = {tag for tag, _, name in conversion(coded).catalog.layers() if name.startswith("layer")}
    assert found | {"fc"} == {*case.tags.split(), "fc"}
    assert found >= set(case.tags.split())


def test_every_formula_and_tag_has_a_case() -> None:
    tags = {tag for each in CASES for tag in each.tags.split()}
    assert {route.tag for route in ROUTES.values()} <= tags
    assert len(FORMULAS) <= len(CASES)


def test_gradients_that_nobody_wants_keep_nothing() -> None:
    model, x = build(case("Linear"))
    coded = converted(model)
    for parameter in coded.parameters():
        parameter.requires_grad_(False)
    assert coded(x).grad_fn is None
    assert torch.equal(coded(x), model(x))
