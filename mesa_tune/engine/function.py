"""The one `autograd.Function` of ours: runs a formula, stores what it keeps, and decodes it in backward."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mesa_tune.codecs import Memory, Spec
from mesa_tune.engine.formula import Formula, Needs, Result, Static
from mesa_tune.engine.packed import Held
from mesa_tune.engine.rematerialize import Recipe, Source, take
from mesa_tune.engine.storage import Meta, Way, encodes, keep, keep_again, way_of
from mesa_tune.errors import RunError
from mesa_tune.ops.maps import Mapped

Memories = dict[int, Memory]
"""What codecs remember of one layer, by the place of the kept tensor in `Result.lossy`."""


class Observer(Protocol):
    """Whoever wants to see what is kept and restored (the profiler); eager only.

    `wants_tensors`: what a step avoids to make is made for it.
    """

    @property
    def wants_tensors(self) -> bool: ...

    def begin(self, layer: str | None, given: Any) -> None:
        """A torch call begins; `layer` is None for a call that is not routed."""
        ...

    def end(self, layer: str | None, output: Any) -> None:
        """That call has ended."""
        ...

    def asked(self, layer: str, tensors: Sequence[Tensor | None]) -> None:
        """A call of `layer` goes by whether one of `tensors` is worth encoding, or copying."""
        ...

    def kept(
        self,
        layer: str,
        lossy: tuple[Tensor | Mapped, ...],
        kept: tuple[Meta | Recipe, ...],
        parts: tuple[list[Tensor], ...],
        exact: list[Tensor],
        row: int,
    ) -> None:
        """A call has stored `lossy` as `parts` (described by `kept`, under a spec of this `row`), and `exact`
        as it is.
        """
        ...

    def saved(self, layer: str, tensor: Tensor) -> None:
        """Autograd itself saves `tensor` during a call of `layer`."""
        ...

    def backward(self, replay: "Replay") -> None:
        """A call's backward begins."""
        ...

    def unpacked(self, layer: str, tensor: Tensor) -> Tensor:
        """A hook gives `tensor` back to autograd; what is returned takes its place."""
        ...


class Plan(NamedTuple):
    """Everything about a call that is settled before it runs; constant in traced code.

    `needs` and `raw` (never encoded) go by the formula's tensors, as do `recipes`: how to make a tensor again
    in place of storing it. `gives`: the exact tensors that are handed out together with the encoded parts,
    for others to make the output again; None if nobody wants it. `known`: for calls whose tensors are all
    alike, how the last one kept them. `places`: which of the tensors given is each of them, where one is
    given for several (traced code gives each but once).
    """

    layer: str
    formula: Formula
    static: Static
    needs: Needs
    raw: Needs
    spec: Spec
    recipes: tuple[Recipe | None, ...]
    gives: tuple[int, ...] | None
    known: "Known | None" = None
    places: tuple[int, ...] | None = None


class Replay:
    """One call's backward, ready to be run again with its kept tensors stored in another way.

    `node` is the call's autograd node, `lossy` what was kept of it as restored, `raw` which of those are
    never encoded, `present` which inputs of the formula are tensors, `row` after how many elements groups
    end (0: anywhere).
    """

    def __init__(
        self, node: Any, call: "_Kept", lossy: list[Tensor], exact: Any, grads: tuple[Tensor, ...]
    ) -> None:
        plan = call.plan
        self.layer, self.formula, self.static, self.needs = plan.layer, plan.formula, plan.static, plan.needs
        self.raw, self.present = node.seen
        self.row = plan.spec.row
        self.node, self.lossy, self.exact, self.grads = node, lossy, exact, grads

    def run(self, lossy: list[Tensor], needs: Needs) -> tuple[Tensor | None, ...]:
        """The gradients that `needs` asks for, from `lossy` in place of what was kept."""
        return self.formula.backward(self.static, needs, lossy, self.exact, *self.grads)


class _Kept(NamedTuple):
    plan: Plan
    kept: tuple[Meta | Recipe, ...]
    exact: int
    extra: int
    derived: bool


class Known:
    """How a call kept what its formula named, so that a like one need not ask: each in a way, or (None) as it
    is, if it was given or is made while it is encoded. What a formula makes of tensors that are alike is
    alike. Nothing is known while `call` is None.
    """

    __slots__ = ("call", "ways")

    def __init__(self) -> None:
        self.call: _Kept | None = None
        self.ways: list[Way | None] = []

    def note(self, call: _Kept, lossy: Sequence[Tensor | Mapped], own: Sequence[Tensor | None]) -> None:
        """Remembers a call that kept `lossy`, if each is encoded, or one of its `own` that never is."""
        ways: list[Way | None] = []
        for tensor, how in zip(lossy, call.kept, strict=True):
            if isinstance(how, Recipe) or how.expanded is not None:
                return
            if how.coded:
                ways.append(None if isinstance(tensor, Mapped) else way_of(tensor, call.plan.spec))
            elif True in [flag for flag, each in zip(call.plan.raw, own, strict=True) if each is tensor]:
                ways.append(None)
            else:
                return
        self.call, self.ways = call, ways


class _Watch:
    observer: Observer | None = None
    backwards = 0


watch = _Watch()


def _is_raw(tensor: Tensor | Mapped, raw: Needs, own: Sequence[Tensor | None]) -> bool:
    """Whether `tensor` is never encoded: one of `own` that is `raw`, or a view of it (eager)."""
    for place, given in enumerate(own):
        if tensor is given:
            return raw[place]
    return not isinstance(tensor, Mapped) and True in [
        flag and given is not None and _same(tensor, given) for flag, given in zip(raw, own, strict=True)
    ]


def _same(tensor: Tensor, given: Tensor) -> bool:
    strided = tensor.layout is given.layout is torch.strided and not torch.compiler.is_compiling()
    return strided and tensor.untyped_storage()._cdata == given.untyped_storage()._cdata


class Apply(torch.autograd.Function):
    """`apply(plan, memory, *tensors, key)`: see `Call.apply`.

    `tensors` are the formula's, then those of the recipes; of all tensors given, a Function may change the
    first alone in place where that is a view. Returns the output, or, where the plan gives, the
    output, the parts of what was encoded, and the exact tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, memory: Memories | None, *given: Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        tensors, key = given[:-1], given[-1]
        assert key is not None
        known, formula = plan.known, plan.formula
        if known is not None and known.call is not None:
            result = formula.forward(plan.static, plan.needs, *tensors)
            ctx.save_for_backward(*result.exact, *keep_again(result.lossy, known.ways, plan.spec, key))
            ctx.call = known.call
            return result.output
        if plan.places is not None:
            tensors = tuple([tensors[place] for place in plan.places])
        count = len(plan.needs)
        own = tensors[:count]
        result = formula.forward(plan.static, plan.needs, *own)
        return _kept_anew(ctx, plan, key, memory, result, own, tensors[count:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        call: _Kept = ctx.call
        traced = torch.compiler.is_compiling()
        if not traced:
            if torch.is_grad_enabled():
                raise _undefined(call.plan.layer)
            watch.backwards += 1
        if grads[0] is None:  # somebody's Function had no gradient for the output
            return (None,) * len(ctx.needs_input_grad)
        found = _gradients(ctx, call, grads[0], traced)
        if call.extra:
            found = (*found, *(None,) * call.extra)
        return None, None, *(found if call.plan.places is None else _summed(found, call.plan.places)), None


def _gradients(ctx: Any, call: _Kept, grad: Tensor, traced: bool) -> tuple[Tensor | None, ...]:
    """The gradients of a formula's tensors."""
    plan, formula, saved = call.plan, call.plan.formula, ctx.saved_tensors
    exact, held = saved[: call.exact], _held(call, saved)
    if not (formula.piecewise is None or call.derived or traced or _watched()):
        found = formula.piecewise(plan.static, plan.needs, held, exact, grad)
        if found is not None:
            return found
    lossy = [each.whole() for each in held]
    if watch.observer is not None:
        watch.observer.backward(Replay(ctx, call, lossy, exact, (grad,)))
    return formula.backward(plan.static, plan.needs, lossy, exact, grad)


def _held(call: _Kept, saved: tuple[Tensor, ...]) -> list[Held]:
    """What a call kept, out of all that autograd saved for it."""
    held, first = [], call.exact
    for how in call.kept:
        held.append(Held(saved[first : first + how.parts], how, call.plan.spec))  # type: ignore[arg-type]
        first += how.parts
    return held


def _kept_anew(
    ctx: Any,
    plan: Plan,
    key: Tensor,
    memory: Memories | None,
    result: Result,
    own: Sequence[Tensor | None],
    extra: Sequence[Tensor | None],
) -> Tensor | tuple[Tensor, ...]:
    """Stores what a formula named; returns what the call does."""
    if result.in_place:
        ctx.mark_dirty(own[0])
    lossy = [_settled(each, plan) if isinstance(each, Mapped) else each for each in result.lossy]
    kept, parts = _parts(plan, key, memory, lossy, own, _by_input(plan, extra) if extra else {})
    ctx.save_for_backward(*result.exact, *[part for each in parts for part in each])
    derived = True in [isinstance(how, Recipe) for how in kept]
    ctx.call = _Kept(plan, tuple(kept), len(result.exact), len(extra), derived)
    if plan.known is not None:
        plan.known.note(ctx.call, lossy, own)
    if watch.observer is not None:
        exact = [each for each in result.exact if each is not None]
        watch.observer.kept(plan.layer, tuple(lossy), tuple(kept), tuple(parts), exact, plan.spec.row)
        never = tuple([_is_raw(tensor, plan.raw, own) for tensor in lossy])
        ctx.seen = never, tuple([given is not None for given in own])
    if plan.gives is None or (result.in_place and result.output._base is not None):
        return result.output  # a Function that changes a view must return nothing else
    given = [part for how, each in zip(kept, parts, strict=True) if _is_fresh(how) for part in each]
    given += [each for place in plan.gives for each in result.exact[place : place + 1] if each is not None]
    ctx.mark_non_differentiable(*given)
    ctx.set_materialize_grads(False)  # zeros in the shape of every part would double them in backward
    return (result.output, *given)


def _parts(
    plan: Plan,
    key: Tensor,
    memory: Memories | None,
    lossy: Sequence[Tensor | Mapped],
    own: Sequence[Tensor | None],
    found: Mapping[int, Source],
) -> tuple[list[Meta | Recipe], list[list[Tensor]]]:
    """How each of `lossy` is kept, and what is saved for it; `found` may stand for some of `own`."""
    kept: list[Meta | Recipe] = []
    parts: list[list[Tensor]] = []
    for place, tensor in enumerate(lossy):
        source = next((found[i] for i in found if tensor is own[i]), None)
        if source is None:
            remembered = None if memory is None else memory.setdefault(place, {})
            raw = _is_raw(tensor, plan.raw, own)
            saved, how = keep(tensor, plan.spec, key, raw, plan.layer, remembered)
            kept.append(how)
            parts.append(saved)
        else:
            kept.append(source.recipe)
            parts.append(list(source.tensors))
    return kept, parts


apply_plan: Any = super(torch.autograd.Function, Apply).apply  # pyright: ignore[reportAttributeAccessIssue]
"""`Apply.apply` for eager code without transforms of `torch.func`: without what looks for them."""


def applied(plan: Plan, key: Tensor, memory: Memories | None, *tensors: Tensor | None) -> Any:
    """`Apply.apply` of a plan, wherever it is called."""
    if torch.compiler.is_compiling():
        distinct, places = _distinct(tensors)
        if len(distinct) < len(tensors):
            plan, tensors = Plan(*plan[:-1], tuple(places)), tuple(distinct)
    elif not torch._C._are_functorch_transforms_active():
        return apply_plan(plan, memory, *tensors, key)
    return Apply.apply(plan, memory, *tensors, key)  # type: ignore[no-untyped-call]


def _distinct(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[int]]:
    """Each tensor once, and the place of each there."""
    found: list[Tensor | None] = []
    places = []
    for tensor in tensors:
        known = [place for place, each in enumerate(found) if each is tensor and tensor is not None]
        places.append(known[0] if known else len(found))
        if not known:
            found.append(tensor)
    return found, places


def _summed(grads: Sequence[Tensor | None], places: tuple[int, ...]) -> list[Tensor | None]:
    """For each tensor given, the sum of the gradients for all that it was given for."""
    sums: list[Tensor | None] = [None] * (max(places) + 1)
    for grad, place in zip(grads, places, strict=True):
        if grad is not None:
            known = sums[place]
            sums[place] = grad if known is None else known + grad
    return sums


def _watched() -> bool:
    """Whether somebody wants to see every tensor."""
    return watch.observer is not None and watch.observer.wants_tensors


def _undefined(layer: str) -> RunError:
    return RunError(
        f"backward with create_graph=True reached {layer!r}, which keeps a compressed copy.\n"
        "Second derivatives of compressed layers are not defined; "
        "give that layer `enable: False`, or mt.revert(model)."
    )


def _by_input(plan: Plan, extra: Sequence[Tensor | None]) -> dict[int, Source]:
    """By input, the recipe that stands for it, with its tensors."""
    tensors = [tensor for tensor in extra if tensor is not None]
    return {
        place: Source(recipe, tuple(take(tensors, recipe.parts)))
        for place, recipe in enumerate(plan.recipes)
        if recipe is not None
    }


def _settled(each: Mapped, plan: Plan) -> Tensor | Mapped:
    """`each`, made unless the encoder can make it and nobody wants to see it."""
    return each.make() if _watched() or not encodes(each, plan.spec, plan.layer) else each


def _is_fresh(kept: Meta | Recipe) -> bool:
    return isinstance(kept, Meta) and kept.coded
