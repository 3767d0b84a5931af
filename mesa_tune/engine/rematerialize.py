"""Rematerializing a function's output in backward from what its producer saves anyway (`store: derive`).

A layer norm's output is γ x̂ + β of the x̂ that the norm saves, so the layers after it need not save it. The
producer returns its packed parts beside its output. The consumer saves these, and computes the output again
in its backward. What is hard is never to take another tensor for that output: eager code finds it in the
registry; traced code, which has neither storages nor versions, compares tensors as objects.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune.codecs import Spec
from mesa_tune.engine.formula import Formula, Ingredients, Needs, Static
from mesa_tune.engine.registry import registry
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.engine.storage import Packing, as_is
from mesa_tune.engine.tensors import cast

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a tensor in its storage."""


class Recipe(NamedTuple):
    """How to rematerialize the output of `layer`, or a view of it, from a list of tensors.

    The list contains, in this order: what the producer saves (`saved`), `exact` tensors that it saves
    exactly, inputs that exist anyway (`references`: a norm's weight), and the tensors for those `inputs` that
    are rematerialized first.
    """

    layer: str
    formula: Formula
    static: Static
    spec: Spec
    saved: tuple["Packing | Recipe", ...]
    exact: int
    references: Needs
    inputs: tuple["Recipe", ...]
    output: Geometry
    dtype: torch.dtype
    view: Geometry

    @property
    def parts(self) -> int:
        """The number of tensors that the recipe takes."""
        below = sum(source.parts for source in (*self.saved, *self.inputs))
        return below + self.exact + sum(self.references)

    def seen_as(self, tensor: Tensor) -> "Recipe":
        """Return the recipe of `tensor`, a view of the output."""
        view = geometry(tensor)
        return self if view == self.view else self._replace(view=view)

    def needed(self) -> list[str]:
        """Return the layers without which there is no such recipe, its own first.

        What these cannot derive, they store.
        """
        return [self.layer, *(layer for source in self.inputs for layer in source.needed())]

    def layers(self) -> list[str]:
        """Return the layers whose saved tensors the recipe takes, its own first."""
        below = [source for source in (*self.saved, *self.inputs) if isinstance(source, Recipe)]
        return [self.layer, *(layer for source in below for layer in source.layers())]


class Source(NamedTuple):
    """A recipe and its tensors."""

    recipe: Recipe
    tensors: tuple[Tensor, ...]


class Rematerialized(SavedTensor):
    """A saved tensor that is rematerialized by a recipe, and only as a whole."""

    __slots__ = ("recipe",)

    def __init__(self, parts: Sequence[Tensor], recipe: Recipe) -> None:
        super().__init__(parts, as_is(recipe.view[0], recipe.dtype), None)
        self.recipe = recipe

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the rematerialized tensor; in `dtype` if one is given."""
        return cast(rebuilt(self.recipe, self.parts), dtype)


def saved_tensor(parts: Sequence[Tensor], how: Packing | Recipe, spec: Spec) -> SavedTensor:
    """Return the tensor that was saved as `parts`."""
    return Rematerialized(parts, how) if isinstance(how, Recipe) else SavedTensor(parts, how, spec)


def rebuilt(recipe: Recipe, tensors: Sequence[Tensor]) -> Tensor:
    """Return the output that `recipe` describes, or the view of it."""
    rest = list(tensors)
    lossy = [saved_tensor(take(rest, how.parts), how, recipe.spec).whole() for how in recipe.saved]
    exact = take(rest, recipe.exact)
    references = [take(rest, 1)[0] if present else None for present in recipe.references]
    inputs = [rebuilt(source, take(rest, source.parts)) for source in recipe.inputs]
    rebuild = recipe.formula.rebuild
    assert rebuild is not None
    y = rebuild.run(Ingredients(recipe.static, lossy, exact, references, inputs)).to(recipe.dtype)
    return _laid_out(y, recipe.output, recipe.view)


def take(tensors: list[Tensor], count: int) -> list[Tensor]:
    """Remove the first `count` tensors from the list, and return them."""
    taken = tensors[:count]
    del tensors[:count]
    return taken


def _laid_out(y: Tensor, output: Geometry, view: Geometry) -> Tensor:
    shape, strides, offset = output
    if y.stride() != strides:
        y = torch.empty_strided(shape, strides, dtype=y.dtype, device=y.device).copy_(y)
    return y if view == output else y.as_strided(view[0], view[1], view[2] - offset)


def geometry(tensor: Tensor) -> Geometry:
    """Return the positions of the elements of `tensor` in its storage."""
    # Traced code has no offsets: it finds only whole outputs, maybe reshaped.
    offset = 0 if torch.compiler.is_compiling() else int(tensor.storage_offset())
    return tuple(tensor.shape), tuple(tensor.stride()), offset


class _Output(NamedTuple):
    """An output that can be rematerialized while its tensors are alive and its storage has this version."""

    version: int
    recipe: Recipe
    tensors: list[weakref.ref[Tensor]]


Traced = list[tuple[Tensor, Source]]
"""Outputs of the outermost forward that traced code can rematerialize, with their sources."""


def remember(y: Tensor, source: Source, traced: Traced | None) -> None:
    """Note that `y` can be rematerialized from `source`, as long as its tensors are alive."""
    if torch.compiler.is_compiling():
        if traced is not None:
            traced.append((y, source))
    elif torch.ops.aten.is_non_overlapping_and_dense(y):
        references = [weakref.ref(tensor) for tensor in source.tensors]
        registry.file(y)["output"] = _Output(y._version, source.recipe, references)


def find(tensor: Tensor, traced: Traced | None) -> Source | None:
    """Return the source from which to rematerialize `tensor`; None if there is none."""
    if torch.compiler.is_compiling():
        return _find_traced(tensor, traced or [])
    facts = registry.facts(tensor) if tensor.layout is torch.strided else None
    output: _Output | None = None if facts is None else facts.get("output")
    if output is None or output.version != tensor._version:
        return None
    tensors = tuple([alive for reference in output.tensors if (alive := reference()) is not None])
    return Source(output.recipe.seen_as(tensor), tensors) if len(tensors) == len(output.tensors) else None


_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")}
_OPERATORS |= {"__iand__", "__ior__", "__ixor__", "__setitem__"}


def _writes(name: str) -> bool:
    # `resize_as_` cannot be traced, not even as an element of a set.
    in_place = name.endswith("_") and not name.startswith(("_", "resize"))
    return name in _OPERATORS or in_place


IN_PLACE = {
    function
    for owner in (Tensor, torch, F)
    for name in dir(owner)
    if _writes(name) and callable(function := getattr(owner, name))
}
"""torch's functions that change their first argument in place."""


def changed(function: Any, args: Any, kwargs: Any, traced: Traced, count: int) -> None:
    """Forget outputs that traced code may have changed in place by calling `function`.

    Eager code compares versions instead. Of the outputs, the first `count` existed before the call.
    """
    in_place = function in IN_PLACE or kwargs.get("inplace") or any(argument is True for argument in args)
    if count and args and in_place:
        valid = [pair for pair in traced[:count] if not _are_one(pair[0], args[0])] + traced[count:]
        traced.clear()
        traced.extend(valid)


def _are_one(y: Tensor, tensor: Any) -> bool:
    return tensor is y or (isinstance(tensor, Tensor) and tensor._base is y)


def _find_traced(tensor: Tensor, traced: Traced) -> Source | None:
    for y, source in reversed(traced):
        reshaped = _are_one(y, tensor) and tensor.numel() == y.numel()
        if tensor is y or (reshaped and tensor.is_contiguous() and y.is_contiguous()):
            return Source(source.recipe.seen_as(tensor), source.tensors)
    return None
