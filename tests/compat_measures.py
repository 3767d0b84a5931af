"""What the training scripts of the compat tests measure: bytes that wait for backward, and gradients."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from mesa_tune.measure.memory.meter import Meter


def saved_bytes(model: nn.Module, loss: Callable[[], Tensor], batch: Iterable[Tensor] = ()) -> int:
    """Bytes born in the forward of `loss()` and alive when it ends; runs its backward, too."""
    with Meter() as meter:
        mark = meter.mark()
        value = loss()
        found: int = meter.live_since(mark, without=[value, *model.parameters(), *model.buffers(), *batch])
        torch.autograd.backward([value])
    model.zero_grad(set_to_none=True)
    return found


def gradient(model: nn.Module, loss: Callable[[], Tensor]) -> Tensor:
    """The gradient of all parameters, in one dimension; leaves none behind."""
    model.zero_grad(set_to_none=True)
    loss().backward()
    found = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(found)


def error(found: Tensor, exact: Tensor) -> float:
    """Relative squared error."""
    return ((found - exact).square().sum() / exact.square().sum()).item()
