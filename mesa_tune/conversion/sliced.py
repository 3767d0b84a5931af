"""Modules that run in slices (`tile`, `on module:`), so that nothing that they make inside is ever whole.

An MLP acts on each row of its input by itself. So it may run on some rows after the others, and again in
backward (as ALST's tiled MLP, arXiv 2506.13996). What is hard is that a module's code does not say whether it
does so. Therefore it first runs on two rows of random numbers, together and apart. A module whose results
differ is not cut.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from mesa_tune.notice import warn_once

_by_rows: WeakKeyDictionary[nn.Module, dict[int, bool]] = WeakKeyDictionary()
"""Whether a module acts by itself on each slice along a dimension."""


class Slices(NamedTuple):
    """The rows of a tensor in `parts` along `dim`, each dense in memory; `sizes`: dimensions of all rows."""

    parts: Sequence[Tensor]
    dim: int
    sizes: Sequence[int]

    def joined(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the output of all rows from those of the parts."""
        output = torch.cat(list(outputs), self.dim)
        return output.view(*self.sizes, *output.shape[self.dim + 1 :]) if self.dim else output


def slices_of(
    module: nn.Module, name: str, count: int, run: Callable[..., Any], args: Any, kwargs: Any
) -> Slices | None:
    """Return the input of `module` in `count` slices; None with a warning where it cannot be cut.

    The input, `(*, features)`, is the first of `args`, and the only tensor. It is cut along its first
    dimension, or, where that is less than `count`, as one sample of all rows. `run` runs the module, and
    saves nothing.
    """
    if not _takes_rows(args, kwargs):
        _warn_of_effect(name, "it takes more than one tensor (*, features)")
        return None
    x: Tensor = args[0]
    rows, dim = x, 0
    if x.shape[0] < count and x.dim() > 2:
        dim = x.dim() - 2
        rows = x.reshape(*[1] * dim, -1, x.shape[-1])
    if rows.shape[dim] < 2:
        return None
    answers = _by_rows.setdefault(module, {})
    if dim not in answers:
        answers[dim] = _acts_on_rows(module, lambda part: run(part, *args[1:], **kwargs), rows, dim)
    if not answers[dim]:
        _warn_of_effect(name, "it does not act on each row of its input by itself")
        return None
    return Slices(rows.tensor_split(min(count, rows.shape[dim]), dim), dim, x.shape[:-1])


def has_slices(module: nn.Module) -> bool:
    """Return whether the module has run in slices, or could have."""
    return any(_by_rows.get(module, {}).values())


def _takes_rows(args: Any, kwargs: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return len(tensors) == 1 and bool(args) and args[0] is tensors[0] and tensors[0].dim() > 1


def _warn_of_effect(name: str, why: str) -> None:
    warn_once(f"mesa-tune: `tile` of {name!r} has no effect: {why}. It runs again as a whole.")


def _acts_on_rows(module: nn.Module, run: Callable[[Tensor], Any], x: Tensor, dim: int) -> bool:
    """Return whether two rows of random numbers along `dim` have the same results together and apart."""
    if any(isinstance(each, _BatchNorm) for each in module.modules()):
        return False
    generator = torch.Generator(x.device).manual_seed(0)
    size = (*x.shape[:dim], 2, *x.shape[dim + 1 :])
    pair = torch.randn(size, generator=generator, dtype=x.dtype, device=x.device)
    with torch.no_grad(), _without_dropout(module):
        together, *apart = run(pair), *map(run, pair.split(1, dim))
    if not isinstance(together, Tensor) or together.shape[: x.dim() - 1] != pair.shape[:-1]:
        return False
    if isinstance(together, FakeTensor):
        return True  # bytes alone are asked: there are no values
    tolerance = 0.02 if together.element_size() == 2 else 1e-4
    return bool((together - torch.cat(apart, dim)).abs().max() <= tolerance * together.abs().max())


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode."""
    training = [each for each in module.modules() if each.training]
    for each in training:
        each.training = False
    try:
        yield
    finally:
        for each in training:
            each.training = True
