"""Options whose errors follow that of another one, in proportion to the errors of the stored tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.measure.errors.prices import Price, can_follow, leaders
from mesa_tune.measure.errors.recorded import Draw
from mesa_tune.profiles.entries import full_grid
from tests.builders import mean_error, workload
from tests.step_memory import Composed, squares

pytestmark = pytest.mark.usefixtures("without_variants")

FOUR, COARSE = mt.LayerSettings(level=16), mt.LayerSettings(level=16, group_size=1024)
THREE, TWO, ONE = (mt.LayerSettings(level=level) for level in (8, 4, 2))
EIGHT = mt.LayerSettings(level=256, group_size=64)
ROWS = [mt.LayerSettings(level=4, rows=share) for share in (0.25, 0.1)]
LEVELS = [mt.LayerSettings(level=level, store="levels") for level in (8, 16)]


def test_one_option_of_each_kind_leads_and_those_of_few_bits_and_of_some_rows_follow_none() -> None:
    options = [ONE, TWO, THREE, FOUR, COARSE, EIGHT, *ROWS, *LEVELS]
    followed = leaders(options, 4)
    assert [followed[option] for option in (THREE, FOUR, COARSE, EIGHT)] == [FOUR] * 4
    for option in (ONE, TWO, *ROWS):
        assert followed[option] == option
    assert [followed[option] for option in LEVELS] == [LEVELS[1]] * 2
    assert leaders([ONE, TWO, THREE, FOUR], 2)[FOUR] == THREE
    assert len(set(leaders(full_grid(), 4).values())) == 9


def test_a_follower_has_its_own_tensor_error_and_times() -> None:
    leader = Price(0.1, 2.0, 3.0, True, 5.0, 6.0, 0.5)
    follower = leader.followed_by(Draw(tensor_error=0.2, encode_ms=1.0, decode_ms=3.0))
    assert follower == Price(0.2, 4.0, 6.0, False, 1.0, 3.0, 1.0)
    lossless = leader.followed_by(Draw())
    assert (lossless.gradient_error, lossless.ratio) == (0.0, 0.0)


def test_nothing_follows_a_tensor_that_is_stored_without_error() -> None:
    assert can_follow(Draw(), Draw())
    assert can_follow(Draw(), Draw(tensor_error=0.1))
    assert not can_follow(Draw(tensor_error=0.1), Draw())


def whole() -> nn.Module:
    """A layer whose input is 0 to 15 in each group: 4 bits store it exactly, 3 bits do not."""

    def forward(m: Any, x: Tensor) -> Any:
        hidden = m.first(x)
        whole = (9 * hidden.detach() + 7).round().clamp(0, 15)
        whole[:, ::256], whole[:, 1::256] = 0, 15
        return m.second(whole + (hidden - hidden.detach()))

    return Composed(forward, first=nn.Linear(16, 512), second=nn.Linear(512, 4))


@pytest.mark.parametrize("options", [[FOUR, THREE], [THREE, FOUR]])
def test_an_option_that_errs_where_its_leader_does_not_is_measured(options: list[mt.LayerSettings]) -> None:
    work = workload(whole, lambda n: torch.randn(n, 16), squares, batch_size=64)
    layer = mt.profile(work, options=options, seeds=1).layer("second")
    errors = {option.settings: option.gradient_error for option in layer.options}
    pairs = [(0, seed) for seed in range(8)]
    policy = mt.Policy.from_assignments([(layer.tag, layer.index, layer.name, THREE)])
    assert errors[FOUR] == pytest.approx(0.0, abs=1e-9)
    assert errors[THREE] == pytest.approx(mean_error(JointError(work), policy, pairs), rel=0.3)
