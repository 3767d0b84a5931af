"""Sums of smaller tensors are saved as their parts, while these say what the sum is."""

from __future__ import annotations

import torch
from torch import Tensor

from mesa_tune.engine import sums

TABLE, MASK = torch.randn(1, 4, 64, 64), torch.randn(64, 1, 1, 64)


def noted(*args: object, **kwargs: object) -> Tensor:
    total: Tensor = torch.add(*args, **kwargs)  # type: ignore[call-overload]
    sums.note(total, args, dict(kwargs))
    return total


def test_a_sum_has_its_parts() -> None:
    found = sums.parts(noted(TABLE, MASK))
    assert found is not None
    assert all(map(torch.equal, found, (TABLE, MASK)))


def test_what_is_no_sum_of_two_has_none() -> None:
    assert sums.parts(noted(TABLE, MASK, alpha=2.0)) is None
    assert sums.parts(noted(TABLE, 3.0)) is None
    assert sums.parts(noted(TABLE, TABLE)) is None
    assert sums.parts(TABLE * 1) is None


def test_parts_that_have_changed_are_not_the_sums() -> None:
    for index in (0, 1):
        given = [TABLE.clone(), MASK.clone()]
        total = noted(*given)
        given[index].add_(1)
        assert sums.parts(total) is None


def test_parts_that_are_gone_are_not_found() -> None:
    for index in (0, 1):
        given = [TABLE.clone(), MASK.clone()]
        total = noted(*given)
        del given[index]
        assert sums.parts(total) is None


def test_a_sum_that_has_changed_is_another() -> None:
    total = noted(TABLE, MASK)
    total.mul_(2)
    assert sums.parts(total) is None


def test_a_sum_that_is_hardly_larger_is_saved_itself() -> None:
    column, row = torch.randn(3, 1), torch.randn(1, 3)
    assert sums._WORTH * (column.numel() + row.numel()) > 9
    assert sums.parts(noted(column, row)) is None


def test_a_sum_of_twice_the_elements_of_its_parts_is_worth_a_note() -> None:
    column, row = torch.randn(4, 1), torch.randn(1, 4)
    assert sums.parts(noted(column, row)) is not None
    assert sums.parts(noted(column, row[:, :3])) is None
