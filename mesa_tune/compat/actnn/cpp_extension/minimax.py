"""ActNN's `minimax`."""

from torch import Tensor


def minimax(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest element of each row of `data`."""
    return data.amin(1), data.amax(1)
