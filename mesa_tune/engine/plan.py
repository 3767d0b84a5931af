"""`CallPlan`: everything that is decided about a call before it runs, and how its tensors are stored."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesa_tune.codecs import Spec
from mesa_tune.engine.formula import Formula, Needs, Static
from mesa_tune.engine.rematerialize import Recipe, Source, geometry, take
from mesa_tune.engine.storage import Packing, decided, is_packed
from mesa_tune.ops.maps import Deferred

Tensors = Sequence[Tensor | None]
Sources = Mapping[int, Source]
"""By position, the sources of those inputs of a call that can be rematerialized."""

Stored = tuple[Packing | Recipe, ...]
"""How each lossy tensor of a call is stored: packed, as it is, or not at all."""


class CallPlan(NamedTuple):
    """How one call is run; constant in traced code.

    `needs`, `exact` (never packed) and `recipes` (rematerialize the tensor instead of storing it) have an
    item for each of the formula's tensors. `exposes`: positions of the exact tensors that the call returns
    with its packed parts, from which others can rematerialize its output; None if it exposes nothing.
    `stored` is set after the first run, and equal for all calls that are alike. `positions`: those of the
    formula's tensors among the tensors passed (traced code passes each tensor only once).
    """

    layer: str
    formula: Formula
    static: Static
    needs: Needs
    exact: Needs
    spec: Spec
    recipes: tuple[Recipe | None, ...] = ()
    exposes: tuple[int, ...] | None = None
    stored: Stored | None = None
    positions: tuple[int, ...] | None = None

    def decided(
        self, lossy: Sequence[Tensor | Deferred], inputs: Tensors, *, shown: bool
    ) -> tuple[Stored, tuple[Tensor | Deferred, ...]]:
        """Return how each lossy tensor is stored, and these tensors, computed if the codec does not do that.

        An input that has a recipe is not stored. `shown`: an observer wants to see tensors that only the
        codec computes.
        """
        stored: list[Packing | Recipe] = []
        for tensor in lossy:
            recipes = [recipe for recipe, given in zip(self.recipes, inputs, strict=False) if tensor is given]
            if recipes and recipes[0] is not None:
                stored.append(recipes[0])
                continue
            packing = decided(tensor, self.spec, self.layer, self.leaves_exact(tensor, inputs))
            stored.append(packing._replace(deferred=False) if packing.deferred and shown else packing)
        return tuple(stored), tuple(map(_as_stored, lossy, stored))

    def leaves_exact(self, tensor: Tensor | Deferred, inputs: Tensors) -> bool:
        """Return whether `tensor` is never packed: an input that is `exact`, or a view of one (eager)."""
        for flag, given in zip(self.exact, inputs, strict=True):
            if tensor is given:
                return flag
        return isinstance(tensor, Tensor) and True in [
            flag and given is not None and _share_storage(tensor, given)
            for flag, given in zip(self.exact, inputs, strict=True)
        ]

    def predicted(self, tensors: Tensors, parts: Sequence[Tensor]) -> "CallPlan":
        """Return the plan of a traced call with `stored`, which the run of a traced call cannot report.

        `parts`: the tensors that it exposes.
        """
        rebuild = self.formula.rebuild
        assert rebuild is not None
        stored: list[Packing | Recipe] = []
        for index in rebuild.saved:
            tensor, recipe = tensors[index], self.recipes[index] if self.recipes else None
            assert tensor is not None
            if rebuild.saved_is_input and recipe is not None:
                stored.append(recipe)
            else:
                exact = rebuild.saved_is_input and self.exact[index]
                stored.append(decided(tensor, self.spec, self.layer, exact))
        packed = sum(isinstance(how, Packing) and how.packed for how in stored)
        each = (len(parts) - len(rebuild.exact)) // packed if packed else 1
        counted = [how.in_parts(each) if isinstance(how, Packing) and how.packed else how for how in stored]
        return self._replace(stored=tuple(counted))

    def exposing(self, tensors: Tensors, sources: Sources) -> "CallPlan":
        """Return the plan of a call that exposes its output, if others can rematerialize it."""
        rebuild = self.formula.rebuild
        if rebuild is None or self.spec.levels == 0 or not rebuild.when(self.static, self.needs):
            return self
        packed = rebuild.saved_is_input or all(self._packs(tensors[index]) for index in rebuild.saved)
        if not packed or any(index not in sources for index in rebuild.inputs):
            return self
        return self._replace(exposes=rebuild.exact)

    def _packs(self, tensor: Tensor | None) -> bool:
        return tensor is not None and 0 not in tensor.stride() and is_packed(tensor, self.spec, self.layer)

    def recipe(self, tensors: Tensors, sources: Sources, y: Tensor) -> Recipe:
        """Return how to rematerialize the output `y`."""
        rebuild = self.formula.rebuild
        assert rebuild is not None
        assert self.stored is not None
        return Recipe(
            self.layer,
            self.formula,
            self.static,
            self.spec,
            self.stored,
            len(rebuild.exact),
            tuple([tensors[index] is not None for index in rebuild.references]),
            tuple([sources[index].recipe for index in rebuild.inputs]),
            geometry(y),
            y.dtype,
            geometry(y),
        )

    def ingredients(
        self, tensors: Sequence[Any], sources: Sources, parts: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Yield the tensors that the recipe takes; `parts` are those that the call itself exposes."""
        rebuild, own = self.formula.rebuild, list(parts)
        assert rebuild is not None
        assert self.stored is not None
        for how, index in zip(self.stored, rebuild.saved, strict=True):
            if isinstance(how, Recipe):
                yield from sources[index].tensors
            elif how.packed:
                yield from take(own, how.parts)
            else:
                yield tensors[index]
        yield from own
        yield from [tensors[index] for index in rebuild.references if tensors[index] is not None]
        for index in rebuild.inputs:
            yield from sources[index].tensors


def _share_storage(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors view one storage; eager only."""
    strided = tensor.layout is other.layout is torch.strided and not torch.compiler.is_compiling()
    return strided and tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


def _as_stored(tensor: Tensor | Deferred, how: Packing | Recipe) -> Tensor | Deferred:
    """Return a deferred tensor if the codec computes it, else the tensor."""
    if isinstance(tensor, Tensor) or (isinstance(how, Packing) and how.deferred):
        return tensor
    return tensor.make()
