"""The table of copies (Rule 3) does not grow with the number of tensors that have come and gone."""

import torch

import mesa_tune.nn as mesa_nn
from mesa_tune.functional import keeping


def test_layers_that_stand_alone_leave_no_trace_of_dead_tensors() -> None:
    keeping.forget_copies()
    layer = mesa_nn.Linear(8, 8)
    for _ in range(3 * keeping._FIRST_LIMIT):
        layer(torch.randn(4, 8, requires_grad=True))
    assert len(keeping._copies.known) <= keeping._FIRST_LIMIT
