"""Every function and layer passes every rule, in every situation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mesa_tune import notice
from mesa_tune.formulas.table import FORMULAS, ROUTES
from tests.conformance import rules
from tests.conformance.cases import CASES, Case, case
from tests.conformance.running import PLAIN, SITUATIONS, Situation, applies, build, converted, step

by_case = pytest.mark.parametrize("case", CASES, ids=lambda each: each.id)
lossy = pytest.mark.parametrize("case", [c for c in CASES if not c.lossless], ids=lambda each: each.id)
BY_ID = {situation.id: situation for situation in SITUATIONS}


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    """A function that passes must not have been refused. One thread: the tensors are tiny."""
    notice._given.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert not [text for text in notice._given if "uncompressed" in text]


@by_case
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.id)
def test_rule_1_forward_is_exact_and_gradient_near(case: Case, situation: Situation) -> None:
    if not applies(case, situation):
        pytest.skip("not a situation of this function")
    rules.check_rule_1(case, situation)


@by_case
@pytest.mark.parametrize("name", ["train", "eval", "non-contiguous", "frozen-weight", "frozen-input"])
def test_formula_is_that_of_pytorch(case: Case, name: str) -> None:
    if not applies(case, BY_ID[name]):
        pytest.skip("no gradient is wanted")
    rules.check_formula(case, BY_ID[name])


@by_case
@pytest.mark.parametrize(
    "name", ["train", "eval", "autocast", "bfloat16", "frozen-weight", "frozen-input", "on-the-batch"]
)
def test_rule_2_never_keeps_more_than_pytorch(case: Case, name: str) -> None:
    if not applies(case, BY_ID[name]):
        pytest.skip("no gradient is wanted")
    rules.check_rule_2(case, BY_ID[name])


def test_rule_3_one_copy_for_all_that_share_settings() -> None:
    rules.check_rule_3_once()


def test_rule_3_never_a_stale_copy() -> None:
    rules.check_rule_3_never_stale()


@by_case
def test_rule_4_runs_twice_before_backward(case: Case) -> None:
    rules.check_rule_4(case)


@pytest.mark.parametrize("levels", [2, 3, 4, 16, 200, 256])
def test_rule_5_clamps(levels: int) -> None:
    rules.check_rule_5(levels)


UNBIASED = ["Linear", "Conv2d", "matmul", "LayerNorm", "BatchNorm2d"]
"""Those whose gradient is linear in what they keep: only there unbiased noise makes an unbiased gradient."""


@pytest.mark.parametrize("name", UNBIASED)
def test_rule_6_unbiased(name: str) -> None:
    rules.check_rule_6_unbiased(case(name))


@lossy
def test_rule_6_noise_follows_seed_and_forward(case: Case) -> None:
    rules.check_rule_6_seeds(case)


@pytest.mark.parametrize(
    "name", ["checkpoint", "checkpoint-reentrant", "checkpoint-outside", "checkpoint-outside-reentrant"]
)
def test_rule_6_noise_is_new_each_step_under_checkpointing(name: str) -> None:
    model, x = build(case("Linear"), BY_ID[name])
    assert all(rules.numbers_of(converted(model, level=16), x, BY_ID[name]))


@by_case
def test_rule_7_statistics_agree_with_data(case: Case) -> None:
    rules.check_rule_7(case)


@by_case
def test_rule_8_is_invisible(case: Case) -> None:
    rules.check_rule_8(case)


@by_case
def test_rule_9_second_backward_and_create_graph(case: Case) -> None:
    rules.check_rule_9(case)


@by_case
def test_case_reaches_its_tags(case: Case) -> None:
    from mesa_tune.conversion.model import conversion_of

    model, x = build(case)
    coded = converted(model)
    step(coded, x, PLAIN)
    conversion = conversion_of(coded)
    assert conversion is not None
    found = {tag for tag, _, name in conversion.catalog.layers() if name.startswith("layer")}
    assert found - {"fc"} == set(case.tags) - {"fc"}
    assert found >= set(case.tags)


def test_every_formula_and_tag_has_a_case() -> None:
    tags = {tag for each in CASES for tag in each.tags}
    assert {route.tag for route in ROUTES.values()} <= tags
    assert len(FORMULAS) <= len(CASES)


def test_gradients_that_nobody_wants_keep_nothing() -> None:
    model, x = build(case("Linear"))
    coded = converted(model)
    for parameter in coded.parameters():
        parameter.requires_grad_(False)
    assert coded(x).grad_fn is None
    assert torch.equal(coded(x), model(x))
