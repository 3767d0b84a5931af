"""Sums of smaller tensors are saved as their parts, while these say what the sum is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mesa_tune.engine import sums
from tests.builders import known

TABLE, MASK = torch.randn(1, 4, 64, 64), torch.randn(64, 1, 1, 64)


def noted(*args: object, **kwargs: object) -> Tensor:
    total: Tensor = torch.add(*args, **kwargs)  # type: ignore[call-overload]
    sums.note(total, args, dict(kwargs))
    return total


def test_a_sum_has_its_parts() -> None:
    assert all(map(torch.equal, known(sums.parts(noted(TABLE, MASK))), (TABLE, MASK)))


def test_what_is_no_sum_of_two_has_none() -> None:
    assert sums.parts(noted(TABLE, MASK, alpha=2.0)) is None
    assert sums.parts(noted(TABLE, 3.0)) is None
    assert sums.parts(noted(TABLE, TABLE)) is None
    assert sums.parts(TABLE * 1) is None


def change(given: list[Tensor], index: int) -> None:
    given[index].add_(1)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("remove", [change, list.pop], ids=["changed", "gone"])
def test_parts_that_are_no_longer_there_are_not_found(remove: Any, index: int) -> None:
    given = [TABLE.clone(), MASK.clone()]
    total = noted(*given)
    remove(given, index)
    assert sums.parts(total) is None


def test_a_sum_that_has_changed_is_another() -> None:
    total = noted(TABLE, MASK)
    total.mul_(2)
    assert sums.parts(total) is None


def test_a_sum_that_is_hardly_larger_is_saved_itself() -> None:
    assert sums._WORTH * (3 + 3) > 9
    assert sums.parts(noted(torch.randn(3, 1), torch.randn(1, 3))) is None


def test_a_sum_of_twice_the_elements_of_its_parts_is_worth_a_note() -> None:
    column, row = torch.randn(4, 1), torch.randn(1, 4)
    assert sums.parts(noted(column, row)) is not None
    assert sums.parts(noted(column, row[:, :3])) is None
