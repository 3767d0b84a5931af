"""The table of copies (Rule 3) does not grow with the number of tensors that have come and gone; scraps."""

import torch
from torch import Tensor, nn

import mesa_tune as mt
import mesa_tune.nn as mesa_nn
from mesa_tune.engine import registry


def test_layers_that_stand_alone_leave_no_trace_of_dead_tensors() -> None:
    registry.registry.clear()
    layer = mesa_nn.Linear(8, 8)
    for _ in range(3 * registry._FIRST_LIMIT):
        layer(torch.randn(4, 8, requires_grad=True))
    assert len(registry.registry._records) <= registry._FIRST_LIMIT


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        token = (x * 1.0)[:, 0]
        return self.first(token), self.second(token)


def kept(output: Tensor) -> Tensor:
    """The input that the linear layer of `output` keeps."""
    assert output.grad_fn is not None
    tensor: Tensor = output.grad_fn.saved_tensors[0]  # type: ignore[attr-defined]
    return tensor


def test_a_small_view_of_a_large_storage_is_copied_once() -> None:
    model = mt.convert(TwoHeads(), mt.Policy.uniform(16))
    x = torch.randn(8, 64, 32, requires_grad=True)
    first, second = (kept(output) for output in model(x))
    assert first.untyped_storage().nbytes() == 8 * 32 * 4
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, x[:, 0])
