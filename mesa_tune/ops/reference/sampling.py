"""Sampling of rows in proportion to their norms, in plain PyTorch: default kernel of `choose_rows`.

Row i is stored with probability p_i = min(1, c · w_i), and divided by p_i, so that its expectation is the row
itself. w_i is the row's norm and a tenth of the mean norm: a small row may meet a large gradient. c is such
that Σ p_i is exactly the number of rows to store. One random number u chooses them all (systematic sampling):
those in whose part of the line from 0 to Σ p_i one of u, u + 1, u + 2, … lies. Rows lie on it by size, so
that the large and the small ones get their share, and no pattern in the order of rows matters.

What is hard: the number of rows must be exact, and equal norms must give equal bits on any device, whatever
the order of its sums. So everything that is added up is an integer.
"""

import torch
from torch import Tensor

from mesa_tune.ops.reference import MASK, mix

UNIT = 1 << 36
"""Probability 1. Sums of up to 2²⁶ probabilities fit 64 bits."""

LARGEST = 1 << 32
"""Weight of the largest norm, but for the floor."""

FLOOR = 10
"""A tenth of the mean norm is added to each."""


def choose_rows(norms: Tensor, count: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices (int32, ascending) of `count` of the rows with these norms, and 1 / p_i (float32).

    `count` is at least 1. A norm that is not finite is chosen for certain, if `count` allows.
    """
    weights = weights_of(norms)
    ordered, order = weights.sort(descending=True, stable=True)
    parts = probabilities(ordered, count)
    points = uniform(key, weights) + UNIT * torch.arange(count, device=weights.device)
    position = torch.searchsorted(parts.cumsum(0), points, right=True)
    index, by_index = order[position].sort()
    return index.to(torch.int32), (UNIT / parts[position][by_index].double()).to(torch.float32)


def row_probabilities(norms: Tensor, count: int) -> Tensor:
    """Return p_i · `UNIT` (int64) of each of the rows of which `choose_rows` stores `count`."""
    ordered, order = weights_of(norms).sort(descending=True, stable=True)
    return torch.empty_like(ordered).scatter_(0, order, probabilities(ordered, count))


def weights_of(norms: Tensor) -> Tensor:
    """Return the weights w_i (int64, 1 or more) of rows with these norms.

    That of a norm that is not finite exceeds the sum of all finite ones.
    """
    finite = norms.isfinite()
    known = torch.where(finite, norms, 0).double()
    most = known.max()
    top = torch.where(finite.all(), LARGEST, LARGEST // (2 * norms.numel()))
    weights = (known / torch.where(most > 0, most, 1) * top).to(torch.int64)
    weights += weights.sum() // (FLOOR * norms.numel()) + 1
    return torch.where(finite, weights, LARGEST)


def probabilities(weights: Tensor, count: int) -> Tensor:
    """Return p_i · `UNIT` for weights in descending order; the sum is `count` units or little more."""
    rest = weights.flip(0).cumsum(0).flip(0)
    left = torch.arange(count, 0, -1, device=weights.device)
    certain = (left * weights[:count] > rest[:count]).sum()
    factor = (count - certain) / rest.gather(0, certain.view(1)).double()
    # Rounded up: no random number is then beyond the end of the line.
    return (weights * (factor * UNIT)).clamp_max_(UNIT).to(torch.int64).add_(2).clamp_max_(UNIT)


def uniform(key: Tensor, weights: Tensor) -> Tensor:
    """Return a random number from 0 to below `UNIT` (int64, one element), a function of key and weights."""
    content = (weights * torch.arange(1, weights.numel() + 1, device=weights.device)).sum()  # modulo 2⁶⁴
    number = torch.zeros_like(content).view(1)
    for word in (key.reshape(1).to(weights.device, non_blocking=True), content):
        for half in (word, word >> 32):
            number = mix(number ^ (half & MASK))
    return number << 4
