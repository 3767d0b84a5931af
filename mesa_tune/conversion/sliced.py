"""Modules that run in slices (`tile`, `on module:`), so that nothing that they make inside is ever whole.

An MLP acts on each row of its input by itself, attention on each sample. So it may run on some of them after
the others, and again in backward (as ALST's tiled MLP, arXiv 2506.13996). What is hard is that no code says
so. Therefore the module first runs on two rows or samples of its input, together and apart. One whose results
differ is not cut, and neither is one in which somebody's hooks would run once per slice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure, tree_unflatten

from mesa_tune.notice import warn_once

Arguments = tuple[Any, Any]
"""Positional arguments and keywords."""

_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, type(None))

Shared = tuple[bool, ...]
"""Of each output of a module, flat, whether it is the same for all slices, not cut as they are."""

_by_slices: WeakKeyDictionary[nn.Module, dict[int, Shared | str]] = WeakKeyDictionary()
"""The outputs of modules for slices along a dimension, or why there are no slices."""

_ALONE = "it does not act on each row or sample of its input by itself"


class Cut(NamedTuple):
    """Arguments of a module, flat, that can be cut along `dim`, each slice dense in memory.

    `tensors`: what is cut, at `positions`; the first is the input. `sizes`: dimensions of the input but its
    last, before it became one sample of all rows. `shared`: of the outputs.
    """

    leaves: Sequence[Any]
    form: TreeSpec
    positions: Sequence[int]
    tensors: Sequence[Tensor]
    dim: int
    sizes: Sequence[int]
    shared: Shared = ()

    @property
    def size(self) -> int:
        """The number of rows or samples."""
        return self.tensors[0].shape[self.dim]

    def slices(self, count: int) -> list[Arguments]:
        """Return the arguments for `count` slices."""
        parts = [tensor.tensor_split(min(count, self.size), self.dim) for tensor in self.tensors]
        return [self._having(part) for part in zip(*parts, strict=True)]

    def pair(self) -> "Cut":
        """Return arguments of the first row or sample, and of the next that has another input."""
        second = 1 if isinstance(self.tensors[0], FakeTensor) else self._other()

        def picked(tensor: Tensor) -> Tensor:
            return torch.cat([tensor.narrow(self.dim, number, 1) for number in (0, second)], self.dim)

        return self._replace(tensors=list(map(picked, self.tensors)))

    def _other(self) -> int:
        rows = self.tensors[0].detach().movedim(self.dim, 0)
        return next((n for n in range(1, len(rows)) if not torch.equal(rows[n], rows[0])), 1)

    def is_changed(self, part: Arguments) -> bool:
        """Return whether a run has changed containers in the arguments of a slice."""
        return tree_structure(part, is_leaf=_is_no_container) != self.form

    def whole(self) -> Arguments:
        """Return the arguments of all rows or samples."""
        return self._having(self.tensors)

    def joined(self, outputs: Sequence[Any]) -> Any:
        """Return the output of the whole from those of slices."""
        leaves = zip(self.shared, *(tree_leaves(output) for output in outputs), strict=True)
        whole = [parts[0] if shared else self._joined(parts) for shared, *parts in leaves]
        return tree_unflatten(whole, tree_structure(outputs[0]))

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        output = torch.cat(list(parts), self.dim)
        return output.view(*self.sizes, *output.shape[self.dim + 1 :]) if self.dim else output

    def _having(self, tensors: Sequence[Tensor]) -> Arguments:
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = tree_unflatten(leaves, self.form)
        return args, kwargs


def cut_of(
    module: nn.Module,
    name: str,
    count: int,
    run: Callable[..., Any],
    trial: Callable[[], AbstractContextManager[None]],
    args: Any,
    kwargs: Any,
) -> Cut | None:
    """Return how the input of `module` is cut into `count` slices; None with a warning where it cannot be.

    The input, `(*, features)`, is the first tensor. It is cut along its first dimension, as are other tensors
    that are as large there; where that is less than `count`, as one sample of all rows, if there is no other
    tensor. `run` runs the module, and saves nothing; what it changes inside `trial` is put back.
    """
    cuts = _cuts(args, kwargs)
    if isinstance(cuts, str):
        warn_of_effect(name, cuts)
        return None
    samples, *rows = cuts
    cut = rows[0] if rows and samples.size < count else samples
    if cut.size < 2:
        return None
    answers = _by_slices.setdefault(module, {})
    for each in cuts:  # also the other way, of other batch sizes: no step but the first is to differ
        if each.size > 1 and each.dim not in answers:
            answers[each.dim] = _outputs(module, run, trial, each) or _ALONE
    shared = answers[cut.dim]
    if isinstance(shared, str):
        warn_of_effect(name, shared)
        return None
    return cut._replace(shared=shared)


def refuse_slices(module: nn.Module, name: str, why: str) -> None:
    """Warn that `tile` of `module` has no effect, and cut it no more."""
    _by_slices[module] = dict.fromkeys(_by_slices[module], why)
    warn_of_effect(name, why)


def has_slices(module: nn.Module) -> bool:
    """Return whether the module has run in slices, or could have."""
    return any(not isinstance(shared, str) for shared in _by_slices.get(module, {}).values())


def _cuts(args: Any, kwargs: Any) -> list[Cut] | str:
    """Return the ways to cut arguments, by samples and perhaps by rows, or why there are none."""
    leaves, form = tree_flatten((args, kwargs), is_leaf=_is_no_container)
    tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    foreign = next((leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_CONSTANTS))), None)
    if foreign is not None:
        return f"slices would share its {type(foreign).__name__}"
    x = next(iter(tensors.values()), None)
    if x is None or x.dim() < 2 or not x.is_floating_point():
        return "its first tensor is no (*, features)"
    cut = [place for place, tensor in tensors.items() if tensor.dim() and tensor.shape[0] == x.shape[0]]
    cuts = [Cut(leaves, form, cut, [tensors[place] for place in cut], 0, x.shape[:-1])]
    if len(tensors) == 1 and x.dim() > 2:
        dim = x.dim() - 2
        rows = x.reshape(*[1] * dim, -1, x.shape[-1])
        cuts.append(Cut(leaves, form, cut, [rows], dim, x.shape[:-1]))
    return cuts


def _is_no_container(value: Any) -> bool:
    return type(value) not in (tuple, list, dict)


def warn_of_effect(name: str, why: str) -> None:
    """Warn that a module does not run in slices."""
    warn_once(f"mesa-tune: `tile` of {name!r} has no effect: {why}. It runs again as a whole.")


def _outputs(
    module: nn.Module,
    run: Callable[..., Any],
    trial: Callable[[], AbstractContextManager[None]],
    cut: Cut,
) -> Shared | None:
    """Return which outputs two rows or samples share; None if these differ together and apart."""
    if any(isinstance(each, _BatchNorm) for each in module.modules()):
        return None

    with torch.no_grad(), torch._C.DisableTorchFunction():  # our own torch calls are no calls of the model
        pair = cut.pair()

    def result(arguments: Arguments) -> list[Any]:
        args, kwargs = arguments
        return tree_leaves(run(*args, **kwargs))

    with trial(), torch.no_grad(), _without_dropout(module):
        try:
            together, *apart = map(result, (pair.whole(), *pair.slices(2)))
        except Exception:  # noqa: BLE001 - whatever it is, of two samples the module does not run
            return None
    with torch._C.DisableTorchFunction():
        return _shared(pair, together, *apart)


def _shared(pair: Cut, together: Sequence[Any], *apart: Sequence[Any]) -> Shared | None:
    """Return which of the outputs `together` are the same for all slices; None if others are no slices'."""
    rows, shared = pair.tensors[0].shape[: pair.dim + 1], list[bool]()
    for whole, *parts in zip(together, *apart, strict=True):
        is_cut = isinstance(whole, Tensor) and whole.shape[: pair.dim + 1] == rows
        if not all(_are_alike(whole, each) for each in ([torch.cat(parts, pair.dim)] if is_cut else parts)):
            return None
        shared.append(not is_cut)
    return None if all(shared) else tuple(shared)


def _are_alike(value: Any, other: Any) -> bool:
    """Return whether two outputs are equal but for rounding."""
    if not isinstance(value, Tensor):
        return isinstance(value, _CONSTANTS) and bool(other == value)
    if value.shape != other.shape:
        return False
    if isinstance(value, FakeTensor):
        return True  # bytes alone are asked: there are no values
    if not value.is_floating_point() or not value.numel():
        return torch.equal(value, other)
    tolerance = 0.02 if value.element_size() == 2 else 1e-4
    return bool((value - other).abs().max() <= tolerance * value.abs().max())


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
