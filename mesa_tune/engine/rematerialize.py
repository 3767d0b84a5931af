"""Having a function's output again without storing it: from what its producer keeps anyway (`store: derive`).

A layer norm's output is γ x̂ + β of the x̂ that the norm keeps, and so the layers after it need not keep it.
The producer gives its packed parts out beside its output; the consumer saves those, and rebuilds the output
in its backward. What is hard is never to take another tensor for that output: eager code finds it by storage
and version, as `storage` does; traced code, which can ask for neither, by the tensor itself.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage

from mesa_tune.codecs import Spec
from mesa_tune.engine.formula import Formula, Needs, Static
from mesa_tune.engine.storage import Meta, restore

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a tensor in its storage."""


class Recipe(NamedTuple):
    """How to make the output of `layer` again, or a view of it, from `parts` tensors.

    They are those of what the producer keeps (`kept`), what it keeps exactly, inputs that are there anyway
    (a norm's weight), and those of `inputs`, which have to be made again first.
    """

    layer: str
    formula: Formula
    static: Static
    spec: Spec
    kept: tuple["Meta | Recipe", ...]
    exact: int
    references: Needs
    inputs: tuple["Recipe", ...]
    output: Geometry
    dtype: torch.dtype
    view: Geometry

    @property
    def parts(self) -> int:
        """How many tensors the recipe needs."""
        below = sum(each.parts for each in (*self.kept, *self.inputs))
        return below + self.exact + sum(self.references)

    def seen_as(self, tensor: Tensor) -> "Recipe":
        """The recipe of `tensor`, a view of the output."""
        return Recipe(*self[:-1], geometry(tensor))

    def layers(self) -> list[str]:
        """The layers whose kept tensors this takes, this one first."""
        below = [each for each in (*self.kept, *self.inputs) if isinstance(each, Recipe)]
        return [self.layer, *(name for each in below for name in each.layers())]


class Source(NamedTuple):
    """A recipe and its tensors."""

    recipe: Recipe
    tensors: tuple[Tensor, ...]


def restored(kept: Meta | Recipe, parts: Sequence[Tensor], spec: Spec) -> Tensor:
    """The kept tensor, from its own parts or made again."""
    return rebuilt(kept, parts) if isinstance(kept, Recipe) else restore(parts, kept, spec)


def rebuilt(recipe: Recipe, tensors: Sequence[Tensor]) -> Tensor:
    """The output that `recipe` describes, or the view of it."""
    rest = list(tensors)
    lossy = [restored(each, take(rest, each.parts), recipe.spec) for each in recipe.kept]
    exact = take(rest, recipe.exact)
    references = [take(rest, 1)[0] if present else None for present in recipe.references]
    inputs = [rebuilt(each, take(rest, each.parts)) for each in recipe.inputs]
    rebuild = recipe.formula.rebuild
    assert rebuild is not None
    y = rebuild.run(recipe.static, lossy, exact, references, inputs).to(recipe.dtype)
    return _placed(y, recipe.output, recipe.view)


def take(tensors: list[Tensor], count: int) -> list[Tensor]:
    """The first `count` tensors, which leave the list."""
    taken = tensors[:count]
    del tensors[:count]
    return taken


def _placed(y: Tensor, output: Geometry, view: Geometry) -> Tensor:
    shape, strides, offset = output
    if y.stride() != strides:
        y = torch.empty_strided(shape, strides, dtype=y.dtype, device=y.device).copy_(y)
    return y if view == output else y.as_strided(view[0], view[1], view[2] - offset)


def geometry(tensor: Tensor) -> Geometry:
    """Where the elements of `tensor` lie in its storage."""
    # Traced code cannot ask for the offset: it knows only whole outputs, and them reshaped.
    offset = 0 if torch.compiler.is_compiling() else int(tensor.storage_offset())
    return tuple(tensor.shape), tuple(tensor.stride()), offset


class _Known(NamedTuple):
    storage: weakref.ref[UntypedStorage]
    version: int
    recipe: Recipe
    tensors: list[weakref.ref[Tensor]]


class _Outputs(threading.local):
    def __init__(self) -> None:
        self.known: dict[int, _Known] = {}


_outputs = _Outputs()

Traced = list[tuple[Tensor, Source]]
"""What traced code knows of outputs; lives as long as the outermost forward."""


def forget_outputs() -> None:
    """Empties the table of known outputs; called when an outermost forward begins."""
    _outputs.known.clear()


def remember(y: Tensor, source: Source, traced: Traced | None) -> None:
    """`y` can be made again from `source`, as long as its tensors live."""
    if torch.compiler.is_compiling():
        if traced is not None:
            traced.append((y, source))
        return
    if not torch.ops.aten.is_non_overlapping_and_dense(y):
        return
    storage, references = y.untyped_storage(), [weakref.ref(tensor) for tensor in source.tensors]
    _outputs.known[storage._cdata] = _Known(weakref.ref(storage), y._version, source.recipe, references)


def find(tensor: Tensor, traced: Traced | None) -> Source | None:
    """How to make `tensor` again; None where nothing is known."""
    if torch.compiler.is_compiling():
        return _find_traced(tensor, traced or [])
    if tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    found = _outputs.known.get(storage._cdata)
    if found is None or found.storage() is not storage or found.version != tensor._version:
        return None
    tensors = tuple(each for reference in found.tensors if (each := reference()) is not None)
    if len(tensors) < len(found.tensors):
        return None
    return Source(found.recipe.seen_as(tensor), tensors)


_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")}
_OPERATORS |= {"__iand__", "__ior__", "__ixor__", "__setitem__"}


def _writes(name: str) -> bool:
    # `resize_as_` cannot be traced, not even as an element of a set.
    in_place = name.endswith("_") and not name.startswith(("_", "resize"))
    return name in _OPERATORS or in_place


IN_PLACE = {
    function
    for place in (Tensor, torch, F)
    for name in dir(place)
    if _writes(name) and callable(function := getattr(place, name))
}
"""torch's functions that write over their first argument."""


def changed(function: Any, args: Any, kwargs: Any, traced: Traced, known: int) -> None:
    """Traced code has called `function`, which may have changed its first argument in place.

    Eager code sees that by the version. Of the outputs, the first `known` were there before the call.
    """
    in_place = function in IN_PLACE or kwargs.get("inplace") or any(given is True for given in args)
    if known and args and in_place:
        valid = [pair for pair in traced[:known] if not _are_one(pair[0], args[0])] + traced[known:]
        traced.clear()
        traced.extend(valid)


def _are_one(y: Tensor, tensor: Any) -> bool:
    return tensor is y or (isinstance(tensor, Tensor) and tensor._base is y)


def _find_traced(tensor: Tensor, traced: Traced) -> Source | None:
    for y, source in reversed(traced):
        reshaped = tensor._base is y and tensor.numel() == y.numel() and tensor.is_contiguous()
        if tensor is y or (reshaped and y.is_contiguous()):
            return Source(source.recipe.seen_as(tensor), source.tensors)
    return None
