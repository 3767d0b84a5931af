"""`Call`: one call of a routed function, for which a route makes a plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mesa_tune.codecs import Spec
from mesa_tune.engine.formula import Formula, Route, Static
from mesa_tune.engine.function import MISS, Lookup, Memories, Question, run, run_cached
from mesa_tune.engine.observer import watch
from mesa_tune.engine.plan import CallPlan, Sources, Tensors
from mesa_tune.engine.rematerialize import Traced, find
from mesa_tune.engine.storage import is_packed, is_too_small
from mesa_tune.engine.tensors import views_large_storage
from mesa_tune.engine.wrappers import INPUTS, NOT_COMPILED, NOT_STORED, WrappedCall, is_wrapper, run_hooked
from mesa_tune.notice import warn_once

Plain = Callable[[], Any]


class Context(Protocol):
    """The module of a conversion in which a call runs; for `mesa_tune.functional`, a substitute.

    `key(device)`: the one-element int64 tensor that rounding noise depends on. `is_static(tensor)`: whether
    `tensor` lies in a parameter, a buffer or the batch: never packed, never counted. `note(layer)`: another
    layer rematerializes the output of `layer`.
    """

    @property
    def traced(self) -> Traced: ...

    def key(self, device: torch.device) -> Tensor: ...
    def is_static(self, tensor: Tensor) -> bool: ...
    def note(self, layer: str) -> None: ...


_ALL_ROWS = (
    "mesa-tune: `rows` has no effect on {!r}, whose backward is not linear in what it saves.\n"
    "Its layers store all rows; set `rows` only for linear layers, convolutions and matrix products."
)

_QUANTIZES = (
    "mesa-tune: `store: levels` has no effect on {!r}: a few values cannot stand for its derivative.\n"
    "Its layers quantize to `level` levels; set it only for activations such as GELU, SiLU and ELU."
)

_USUAL_GROUPS = 1024
"""Groups of this size, or of a smaller power of two, end with rows whose length is a multiple of it."""


def may_change(_: Context, tensor: Tensor) -> bool:
    """Return whether a formula may change its first tensor in place.

    It may not change a leaf or a view of a leaf, and in traced code no view.
    """
    base = tensor._base
    if tensor.is_leaf or base is None:
        return not tensor.is_leaf
    return not (base.is_leaf or torch.compiler.is_compiling())


@dataclass(eq=False)
class Call:
    """A call as a route receives it (`routes` of each family); the route names the formula and its tensors.

    `plain()` is the call as PyTorch would run it. A route without a formula for the arguments returns
    `call.refuse(why)`. `cache`: that of the conversion; None if nothing is cached.

    A later call that is alike runs by the same plan without its route. So a route may use arguments that are
    no tensors, geometry and dtype of tensors, and the answers of the call to its questions (`answers`), but
    nothing else. Its results are `plan`, `tensors` and `output`; without a plan, `output` is that of
    `plain()`.
    """

    layer: str
    spec: Spec
    context: Context
    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    memories: Memories | None = None
    cache: Any = None
    hooked: Plain | None = None
    opened: Plain | None = None
    worth: bool = False
    answers: list[tuple[Question, Tensor | None, Any]] = field(default_factory=list)
    lookups: list[tuple[Lookup, Tensor, Sequence[Tensor] | None]] = field(default_factory=list)
    candidates: tuple[int, ...] = ()
    sources: Sources = field(default_factory=dict)
    plan: CallPlan | None = None
    tensors: Tensors = ()
    output: Any = None
    parts: int = 0

    def plain(self) -> Any:
        """Return the output of PyTorch's function."""
        self.output = self.func(*self.args, **self.kwargs)
        return self.output

    def run_by(self, route: Route) -> Any:
        """Return the output of the call by its route."""
        given = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]
        if any(map(is_wrapper, given)):
            return self._by_hooks(route, given)
        if any(map(_is_odd, given)):
            warn_once(NOT_STORED)
            return self.plain()
        unknown = [name for name in self.kwargs if name not in route.parameters]
        if unknown:
            return self.refuse(f"{route.name} has no formula for {sorted(unknown)}")
        if self.spec.tile > 1 and not route.tiles:
            return self.untiled(f"{route.name} has no slices", partial(route.serve, self))
        return route.serve(self, *self.args, **self.kwargs)

    def _by_hooks(self, route: Route, given: Sequence[Tensor]) -> Any:
        """Return the plain output of a call on tensors that consist of others; hooks store its inputs."""
        if self.spec.tile > 1:
            self.warn_untiled("its tensors are distributed")
        if route.name not in INPUTS or self.hooked is None:
            return self.plain()
        if torch.compiler.is_compiling():
            warn_once(NOT_COMPILED)
            return self.plain()
        spec = self.spec.alone if self.spec.codec == "quantize" and self.spec.levels else self.spec.hooked
        inputs = [tensor for tensor in given if tensor.is_floating_point() and not self.is_static(tensor)]
        return self.plain() if spec is None else run_hooked(self.hooked, WrappedCall.of(spec, inputs))

    def ask(self, question: Question, tensor: Tensor | None) -> Any:
        """Return the answer to a question, on which the plan depends from now on."""
        answer = question(self.context, tensor)
        self.answers.append((question, tensor, answer))
        return answer

    def look_up(self, look: Lookup, tensor: Tensor) -> Sequence[Tensor] | None:
        """Return the tensors that `look` finds for `tensor`, which the formula takes with it."""
        tensors = look(tensor)
        self.lookups.append((look, tensor, tensors))
        return tensors

    def is_static(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is never packed, and costs nothing to save as it is."""
        return type(tensor) is nn.Parameter or bool(self.ask(type(self.context).is_static, tensor))

    def may_change(self, tensor: Tensor) -> bool:
        """Return whether a formula may change `tensor`, its first, in place."""
        return bool(self.ask(may_change, tensor))

    def apply(self, formula: Formula, static: Static, *tensors: Tensor | None) -> Any:
        """Run `formula` on the tensors; `plain()` if no gradient is needed or nothing would get smaller."""
        needs = tuple([tensor is not None and tensor.requires_grad for tensor in tensors])
        if True not in needs or _has_tensor(static):  # a tensor in place of a number
            return self.plain()
        self._finds_levels(formula, static)
        exact = self._stores_all_rows(formula, static) and self.spec.levels == 0
        if exact or not (self.worth or formula.lossless or self._pays(_without_parameters(tensors))):
            return self.plain()
        never = tuple([tensor is None or self.is_static(tensor) for tensor in tensors])
        for tensor, flag in zip(tensors, never, strict=True):
            if tensor is not None and not flag:
                self._is_copied(tensor)
        plan = CallPlan(self.layer, formula, static, needs, never, self.spec)
        sources: Sources = {}
        if self.spec.derive or self.spec.exposes:
            plan, sources = self._deriving(plan, tensors)
        key = self.context.key(next(tensor.device for tensor in tensors if tensor is not None))
        output = run(plan, self.memories, key, tensors, sources, self.context.traced)
        self.plan, self.tensors, self.output = plan, tensors, output
        return output

    def _stores_all_rows(self, formula: Formula, static: Static) -> bool:
        """Let the spec say which axis a row has; return whether rows would be left out if there was one."""
        axis = 0 if formula.row_axis is None else formula.row_axis(static)
        without_effect = self.spec.rows < 1 and not axis
        if without_effect and not formula.lossless:
            warn_once(_ALL_ROWS.format(getattr(self.func, "__name__", formula.name)))
        self.spec = self.spec.along(axis)
        return without_effect

    def _finds_levels(self, formula: Formula, static: Static) -> None:
        """Let the spec say which values elements may have, if its settings want fixed ones."""
        if self.spec.codec == "levels":
            codebook = formula.codebook(static, self.spec.levels)
            if codebook is None and not formula.lossless:
                warn_once(_QUANTIZES.format(getattr(self.func, "__name__", formula.name)))
            self.spec = self.spec.valued(codebook)

    def _deriving(self, plan: CallPlan, tensors: Tensors) -> tuple[CallPlan, Sources]:
        """Return the plan of a call that rematerializes inputs or exposes its output, and the sources."""
        traced, least = self.context.traced, self.spec.min_elements
        sources = {}
        for index, tensor in enumerate(tensors):
            if tensor is not None and not plan.exact[index] and tensor.numel() > least:
                self.candidates = (*self.candidates, index)
                source = find(tensor, traced)
                if source is not None:
                    sources[index] = source
        self.sources = sources
        if self.spec.derive and not plan.formula.lossless:  # else the call saves no tensor, derived or not
            for source in sources.values():
                for layer in source.recipe.layers():
                    self.context.note(layer)
            recipes = [sources[i].recipe if i in sources else None for i in range(len(tensors))]
            plan = plan._replace(recipes=tuple(recipes))
        return plan.exposing(tensors, sources) if self.spec.exposes else plan, sources

    def part(self, route: Route, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `func(*args, **kwargs)`, one part of this call, by its route."""
        self.parts += 1
        name = (self.layer, self.parts, self.spec)
        if self.cache is not None:
            cached = run_cached(self.cache.calls, name, func, args, kwargs, self.context)
            if cached is not MISS:
                return cached
        part = type(self)(self.layer, self.spec, self.context, func, args, kwargs)
        output = part.run_by(route)
        if self.cache is not None:
            self.cache.note(name, part, output)
        return output

    def may_lose_zeros(self, x: Tensor) -> bool:
        """Return whether a row of zeros of `x` may be decoded as other numbers: groups reach over rows.

        The answer is the same for all usual sizes of groups, codecs and tensors, so that a profile can
        predict what is saved besides.
        """
        spec = self.spec
        if x.dim() < 2 or x.numel() <= spec.min_elements or self.is_static(x):
            return False
        over_rows = spec.quant_groups > 0 or x.shape[-1] % max(spec.group_size, _USUAL_GROUPS) > 0
        return over_rows and spec.levels > 0

    def refuse(self, why: str) -> Any:
        """Return the plain output, with a warning that names the layer (Rule 9)."""
        warn_once(f"mesa-tune: {self.layer!r} is left uncompressed: {why}.")
        return self.plain()

    def untiled(self, why: str, serve: Callable[..., Any]) -> Any:
        """Return the output of the call by its other settings, with a warning that names the layer (Rule 9).

        Without `tile`, `store: exact` is the plain call; other settings `serve` it.
        """
        self.warn_untiled(why)
        return self.plain() if self.spec.levels == 0 else serve(*self.args, **self.kwargs)

    def warn_untiled(self, why: str) -> None:
        """Warn that the layer's setting `tile` has no effect in this call."""
        warn_once(f"mesa-tune: `tile` of {self.layer!r} has no effect: {why}.")

    def leave(self, why: str) -> Any:
        """Return the plain output, with a warning that names the layer (Rule 9).

        In eager code of a converted model, the hooks store what it saves.
        """
        warn_once(f"mesa-tune: {self.layer!r} is left to the hooks (8 bits or more, eager only): {why}.")
        return self.plain() if self.hooked is None else self.hooked()

    def open(self) -> Any:
        """Return the output of the function's body with the calls in it routed, if that is possible."""
        return self.plain() if self.opened is None else self.opened()

    def gains(self, *tensors: Tensor) -> bool:
        """Return whether one of the tensors gets smaller under these settings, packed or copied."""
        self.worth = self._pays(tensors)
        return self.worth

    def gains_on(self, x: Tensor) -> bool:
        """Return whether something smaller can be saved in place of `x`.

        It needs a gradient, is large enough, and is no parameter, buffer or batch.
        """
        return x.requires_grad and self.gains(x) and not self.is_static(x)

    def _pays(self, tensors: Tensors) -> bool:
        present = [tensor for tensor in tensors if tensor is not None]
        if watch.observer is not None:
            watch.observer.asked(self.layer, present)
        if self.spec.levels == 0:
            return any(tensor.numel() > self.spec.min_elements for tensor in present)
        return any(self._is_worth_storing(tensor) for tensor in present)

    def _is_worth_storing(self, tensor: Tensor) -> bool:
        # PyTorch may save the copy that autocast makes, which is smaller than the tensor itself.
        dtype = autocast_dtype(tensor)
        if is_packed(tensor, self.spec, self.layer, None if dtype is None else dtype.itemsize):
            return True
        return self._is_copied(tensor) and not self.is_static(tensor)

    def _is_copied(self, tensor: Tensor) -> bool:
        """Return whether `tensor`, too small to be packed, is copied out of a large storage."""
        return is_too_small(tensor, self.spec) and self.ask(views_large_storage, tensor)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_tensor(element) for element in value)
    return isinstance(value, Tensor)


def _without_parameters(tensors: Tensors) -> Tensors:
    """Return the tensors but parameters of which autocast makes no copy: saving these costs nothing."""
    # Not by their type: fake parameters have another.
    return [
        tensor
        for tensor in tensors
        if not (isinstance(tensor, nn.Parameter) and autocast_dtype(tensor) in (None, tensor.dtype))
    ]


def casts(kind: str) -> bool:
    """Return whether autocast is on for a kind of device (some have none)."""
    possible = torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()
    return possible and torch.is_autocast_enabled(kind)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast would cast a matrix product of `x`; None outside autocast."""
    kind = x.device.type
    if not casts(kind) or x.dtype == torch.float64 or not x.is_floating_point():
        return None
    return torch.get_autocast_dtype(kind)


def _is_odd(tensor: Tensor) -> bool:
    """Return whether no formula takes tensors of this kind."""
    return tensor.layout is not torch.strided or tensor.dtype.is_complex or tensor.is_nested
