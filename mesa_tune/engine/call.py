"""`Call`: one call of a routed function, knowing its layer, its settings and what must not be encoded."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesa_tune.codecs import Spec
from mesa_tune.engine.formula import Formula, Needs, Static, autocast_dtype
from mesa_tune.engine.function import Memories, Plan, applied, watch
from mesa_tune.engine.rematerialize import Recipe, Source, Traced, find, geometry, remember, take
from mesa_tune.engine.storage import Meta, is_encoded, is_scrap
from mesa_tune.notice import warn_once

Plain = Callable[[], Any]


class Links(NamedTuple):
    """What ties a call to others: the outputs that traced code knows, and whom to tell of layers in use."""

    traced: Traced
    note: Callable[[str], None]


class Served(NamedTuple):
    """How a formula was run: by `plan`, on `tensors`, for an `output`."""

    plan: Plan
    tensors: Sequence[Tensor | None]
    output: Tensor


class Call:
    """Handed to a route (`routes` of each family), which names the formula and the tensors.

    `plain()` is the call as PyTorch would have run it; a route that cannot serve the arguments returns
    `call.refuse(why)`. `served` is how the formula was run: a route that returns its output, but goes by more
    than the arguments' values and their tensors' geometry, or does more than that, sets it to None.
    """

    __slots__ = (
        "hooked",
        "is_static",
        "key",
        "layer",
        "links",
        "memory",
        "opened",
        "plain",
        "served",
        "spec",
        "worth",
    )

    def __init__(
        self,
        layer: str,
        spec: Spec,
        key: Callable[[torch.device], Tensor],
        is_static: Callable[[Tensor], bool],
        plain: Plain,
        memory: Memories | None = None,
        links: Links | None = None,
    ) -> None:
        self.layer = layer
        self.spec = spec
        self.key = key
        self.is_static = is_static
        self.plain = plain
        self.hooked = plain
        self.opened = plain
        self.memory = memory
        self.links = links
        self.worth = False
        self.served: Served | None = None

    def apply(self, formula: Formula, static: Static, tensor: Tensor, *others: Tensor | None) -> Any:
        """Runs `formula` on the tensors; plain where no gradient is wanted or nothing would get
        smaller.
        """
        tensors = (tensor, *others)
        needs, odd = _wanted(tensors)
        if True not in needs:
            return self.plain()
        if odd:
            return self.refuse("complex, sparse and nested tensors have no formula")
        if not (self.worth or formula.lossless or self._pays(tensors)):
            return self.plain()
        raw = tuple([given is None or self.is_static(given) for given in tensors])
        if not (self.spec.derive or self.spec.serves):
            plan = Plan(self.layer, formula, static, needs, raw, self.spec, (), None)
            output = applied(plan, self.key(tensor.device), self.memory, *tensors)
            self.served = None if self.memory is not None else Served(plan, tensors, output)
            return output
        sources = self._sources(tensors, raw)
        gives = self._gives(formula, static, needs, tensors, sources) if self.spec.serves else None
        used = self._used(sources)
        recipes = tuple(used[place].recipe if place in used else None for place in range(len(tensors)))
        plan = Plan(self.layer, formula, static, needs, raw, self.spec, recipes, gives)
        # Detached: they get no gradient here, and a backward must not reach others' graphs through them.
        extra = [each.detach() for source in used.values() for each in source.tensors]
        given = applied(plan, self.key(tensor.device), self.memory, *tensors, *extra)
        if gives is None or isinstance(given, Tensor):
            return given
        self._remember(plan, tensors, sources, given)
        return given[0]

    def _sources(self, tensors: Sequence[Tensor | None], raw: Needs) -> dict[int, Source]:
        """By place, the inputs that could be made again: those to be kept, and those that a rebuild takes."""
        assert self.links is not None
        places = {place for place, flag in enumerate(raw) if not flag}
        found = {}
        for place in sorted(places):
            tensor = tensors[place]
            if tensor is None or tensor.numel() <= self.spec.min_elements:
                continue
            source = find(tensor, self.links.traced)
            if source is not None:
                found[place] = source
        return found

    def _used(self, sources: dict[int, Source]) -> dict[int, Source]:
        """The sources that stand for what would else be stored."""
        if not self.spec.derive or self.links is None:
            return {}
        for source in sources.values():
            for layer in source.recipe.layers():
                self.links.note(layer)
        return sources

    def _gives(
        self,
        formula: Formula,
        static: Static,
        needs: Needs,
        tensors: Sequence[Tensor | None],
        sources: dict[int, Source],
    ) -> tuple[int, ...] | None:
        """The exact tensors to hand out if this output can be made again; else None."""
        rebuild = formula.rebuild
        if rebuild is None or self.spec.levels == 0 or not rebuild.when(static, needs):
            return None
        if any(place not in sources for place in rebuild.inputs):
            return None
        encoded = rebuild.kept_is_input or all(self._is_encoded(tensors[place]) for place in rebuild.kept)
        return rebuild.exact if encoded else None

    def _is_encoded(self, tensor: Tensor | None) -> bool:
        if tensor is None or 0 in tensor.stride():
            return False
        return is_encoded(tensor, self.spec, self.layer)

    def _remember(
        self,
        plan: Plan,
        tensors: Sequence[Tensor | None],
        sources: dict[int, Source],
        given: Sequence[Tensor],
    ) -> None:
        """Says how the output of a call that gave its parts out can be made again."""
        rebuild = plan.formula.rebuild
        assert rebuild is not None
        assert self.links is not None
        y, rest = given[0], list(given[1:])
        exact = rest[len(rest) - len(rebuild.exact) :]
        pairs = self._kept(plan, tensors, sources, rest[: len(rest) - len(exact)])
        references = [tensors[place] for place in rebuild.references]
        inputs = [sources[place] for place in rebuild.inputs]
        flat = [
            *(part for _, parts in pairs for part in parts),
            *exact,
            *(each for each in references if each is not None),
        ]
        flat += [each for source in inputs for each in source.tensors]
        recipe = Recipe(
            plan.layer,
            plan.formula,
            plan.static,
            plan.spec,
            tuple(how for how, _ in pairs),
            len(exact),
            tuple(each is not None for each in references),
            tuple(source.recipe for source in inputs),
            geometry(y),
            y.dtype,
            geometry(y),
        )
        remember(y, Source(recipe, tuple(flat)), self.links.traced)

    @property
    def serves(self) -> bool:
        """Whether another layer may want this one's output made again."""
        return self.spec.serves

    def _kept(
        self, plan: Plan, tensors: Sequence[Tensor | None], sources: dict[int, Source], fresh: list[Tensor]
    ) -> list[tuple[Meta | Recipe, list[Tensor]]]:
        """How each kept tensor is restored, and from what; `fresh` are the parts of those encoded."""
        rebuild = plan.formula.rebuild
        assert rebuild is not None
        pairs: list[tuple[Meta | Recipe | None, Tensor, list[Tensor]]] = []
        for place in rebuild.kept:
            tensor, recipe = tensors[place], plan.recipes[place]
            assert tensor is not None
            if rebuild.kept_is_input and recipe is not None:
                pairs.append((recipe, tensor, list(sources[place].tensors)))
            elif rebuild.kept_is_input and (plan.raw[place] or not self._is_encoded(tensor)):
                pairs.append((Meta(1, False, tuple(tensor.shape), tensor.dtype, None), tensor, [tensor]))
            else:
                pairs.append((None, tensor, []))
        encoded = sum(how is None for how, _, _ in pairs)
        each = len(fresh) // encoded if encoded else 0
        return [
            (Meta(each, True, tuple(tensor.shape), tensor.dtype, None), take(fresh, each))
            if how is None
            else (how, parts)
            for how, tensor, parts in pairs
        ]

    def part(self, plain: Plain) -> "Call":
        """A call for one part of this one, which `plain` runs as PyTorch would."""
        return Call(self.layer, self.spec, self.key, self.is_static, plain, None, self.links)

    def within(self, row: int) -> "Call":
        """This call, from now on with groups that end where rows of `row` elements do."""
        self.spec = self.spec.within(row)
        return self

    def refuse(self, why: str) -> Any:
        """Runs the call as PyTorch would, with a warning that names the layer (Rule 9)."""
        warn_once(f"mesa-tune: {self.layer!r} is left uncompressed: {why}.")
        return self.plain()

    def leave(self, why: str) -> Any:
        """Runs the call as PyTorch would, and what it keeps goes to the hooks where there are any: eager code
        of a converted model; with a warning that names the layer (Rule 9).
        """
        warn_once(f"mesa-tune: {self.layer!r} is left to the hooks (8 bits or more, eager only): {why}.")
        return self.hooked()

    def changes(self, tensor: Tensor) -> bool:
        """Whether a formula may change `tensor`, its first, in place: no leaf, no view of one, and in traced
        code no view at all.
        """
        base = tensor._base
        if tensor.is_leaf or base is None:
            return not tensor.is_leaf
        return not (base.is_leaf or torch.compiler.is_compiling())

    def small(self, *tensors: Tensor) -> bool:
        """Whether no tensor is worth encoding, or copying out of a large storage: too small, or no smaller
        under these settings.
        """
        self.worth = self._pays(tensors)
        return not self.worth

    def _pays(self, tensors: Sequence[Tensor | None]) -> bool:
        if watch.observer is not None:
            watch.observer.asked(self.layer, tensors)
        if self.spec.levels == 0:
            return any(given is not None and given.numel() > self.spec.min_elements for given in tensors)
        for tensor in tensors:
            if tensor is None:
                continue
            # PyTorch may keep the copy that autocast makes, which is smaller than the tensor itself.
            dtype = autocast_dtype(tensor)
            size = None if dtype is None else dtype.itemsize
            if is_encoded(tensor, self.spec, self.layer, size):
                return True
            if is_scrap(tensor, self.spec) and not self.is_static(tensor):
                return True
        return False


def _wanted(tensors: Sequence[Tensor | None]) -> tuple[Needs, bool]:
    """Which of them want a gradient, and whether one is of a kind that no formula knows."""
    needs, odd = [], False
    for given in tensors:
        needs.append(given is not None and given.requires_grad)
        if given is not None and (
            given.layout is not torch.strided or given.dtype.is_complex or given.is_nested
        ):
            odd = True
    return tuple(needs), odd
