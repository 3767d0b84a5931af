"""`Apply`, our only `autograd.Function`, and `CachedCall`: a call runs by its plan, made anew or cached.

`Apply` runs the formula, stores what it saves, and restores it in backward. What is hard is that eager and
traced code, in-place operations and views of PyTorch all limit what a Function may return, and that other
layers may need its packed parts (`store: derive`).
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks as _saving_hooks

from mesa_tune.codecs import Memory
from mesa_tune.engine.formula import Grads, Result, Saved
from mesa_tune.engine.head import Head
from mesa_tune.engine.observer import Replay, watch
from mesa_tune.engine.plan import CallPlan, Sources, Tensors
from mesa_tune.engine.rematerialize import Recipe, Source, Traced, find, remember, saved_tensor, take
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.engine.storage import Packing, pack_zero_rows, store
from mesa_tune.engine.tensors import distinct, summed, unviewed
from mesa_tune.errors import RunError
from mesa_tune.ops.maps import Deferred

Memories = dict[int, Memory]
"""What codecs remember of one layer, by position in `Result.lossy`."""


class _Saving(threading.local):
    """The hooks of a checkpoint in whose first run what calls save is never used; None elsewhere.

    It may be looked at by other hooks inside, of a checkpoint of the model's own, say.
    """

    in_vain: tuple[Any, Any] | None = None


_saving = _Saving()


@contextmanager
def saving_in_vain() -> Iterator[None]:
    """Run the body, the first run of a checkpointed part: calls save as many tensors, but encode none."""
    before, _saving.in_vain = _saving.in_vain, _saving_hooks(True)
    try:
        yield
    finally:
        _saving.in_vain = before


class Apply(torch.autograd.Function):
    """`apply(plan, memories, *tensors, key)`: one call, as planned.

    `tensors` are the formula's, then those of the recipes. The tensor that a formula changes in place comes
    first: if it is a view, a Function may change no other. Return the output, or, if the plan exposes it, the
    output, the packed parts, and the exact tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: CallPlan, memories: Memories | None, *arguments: Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        tensors, key = arguments[:-1], arguments[-1]
        assert key is not None
        if plan.positions is not None:
            tensors = tuple([tensors[index] for index in plan.positions])
        formula, count = plan.formula, len(plan.needs)
        inputs = tensors[:count]
        result = formula.forward(plan.static, plan.needs, *inputs)
        in_vain = _saving.in_vain is not None and _saving.in_vain == _saving_hooks(True)
        if in_vain and plan.stored is not None and plan.exposes is None:
            saved = _save_as_many(ctx, plan, key, result)
        else:
            saved = _save(ctx, plan, memories, key, result, inputs, tensors[count:])
        output = result.output
        if result.in_place:
            ctx.mark_dirty(inputs[0])
        elif formula.views:
            output = unviewed(output)
        if formula.is_head:
            ctx.head = Head.of(inputs, output, plan.static[0])
            ctx.set_materialize_grads(False)  # a tiled loss has no gradient for the output
        if plan.exposes is None or (result.in_place and output._base is not None):
            return output  # a Function that changes a view must return nothing else
        return output, *_exposed(ctx, result.exact, saved)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Grads:
        plan: CallPlan = ctx.plan
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                raise _undefined(plan.layer)
            watch.backwards += 1
        count = len(ctx.needs_input_grad)
        if grads[0] is None:  # somebody's Function had no gradient for the output
            return (None,) * count
        gradients = _gradients(ctx, plan, grads[0])
        if plan.positions is not None:
            gradients = summed(gradients, plan.positions)
        return (None, None, *gradients, *(None,) * (count - 2 - len(gradients)))


def _save(
    ctx: Any,
    plan: CallPlan,
    memories: Memories | None,
    key: Tensor,
    result: Result,
    inputs: Sequence[Tensor | None],
    extra: Sequence[Tensor | None],
) -> list[list[Tensor]]:
    """Save for backward what the formula has returned; return what is saved for each lossy tensor.

    These are its packed parts, itself, or what it is made again from.
    """
    lossy, exact, stored = result.lossy, result.exact, plan.stored
    if stored is None:
        shown = watch.observer is not None and watch.observer.wants_tensors
        stored, lossy = plan.decided(lossy, inputs, shown=shown)
    sources, spec, memory = _sources(plan, extra) if plan.recipes else {}, plan.spec, None
    saved: list[list[Tensor]] = []
    marks: list[Tensor] = []
    for tensor, how in zip(lossy, stored, strict=True):
        zero_rows = marks if len(saved) < result.marked else None
        if isinstance(how, Recipe):
            saved.append(_derived(tensor, sources, inputs, zero_rows))
            continue
        if memories is not None:
            memory = memories.setdefault(len(saved), {})
        saved.append(store(tensor, how, spec, key, memory, zero_rows=zero_rows))
    exact = (*exact, *marks)
    if plan.stored is None:
        pairs = zip(stored, saved, strict=True)
        counted = [how if isinstance(how, Recipe) else how.in_parts(len(parts)) for how, parts in pairs]
        plan = plan._replace(stored=tuple(counted))
    ctx.save_for_backward(*chain(*saved), *exact)
    ctx.plan = plan
    if watch.observer is not None:
        _show(ctx, plan, lossy, saved, exact, inputs)
    return saved


def _save_as_many(ctx: Any, plan: CallPlan, key: Tensor, result: Result) -> list[list[Tensor]]:
    """Save the key as often as `_save` would save a tensor: a checkpoint counts them, and keeps none."""
    assert plan.stored is not None
    count = sum(how.parts for how in plan.stored)
    ctx.save_for_backward(
        *[key] * count, *[None if tensor is None else key for tensor in result.exact], *[key] * result.marked
    )
    ctx.plan = plan
    return []


def _derived(
    tensor: Any, sources: Mapping[int, list[Tensor]], inputs: Sequence[Tensor | None], zero_rows: Any
) -> list[Tensor]:
    """Return what `tensor`, one of the inputs, is made again from; which rows are zero as in `store`."""
    if zero_rows is not None:
        zero_rows.append(pack_zero_rows(tensor))
    return next(parts for index, parts in sources.items() if tensor is inputs[index])


def _sources(plan: CallPlan, extra: Sequence[Tensor | None]) -> dict[int, list[Tensor]]:
    """Return the tensors of each recipe by the position of the input that it rematerializes."""
    rest = [tensor for tensor in extra if tensor is not None]
    return {
        index: take(rest, recipe.parts) for index, recipe in enumerate(plan.recipes) if recipe is not None
    }


def _exposed(ctx: Any, exact: Sequence[Any], saved: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the tensors that the plan exposes."""
    plan: CallPlan = ctx.plan
    assert plan.stored is not None
    assert plan.exposes is not None
    stored = zip(plan.stored, saved, strict=True)
    exposed = [part for how, parts in stored if isinstance(how, Packing) and how.packed for part in parts]
    exposed += [exact[index] for index in plan.exposes if exact[index] is not None]
    ctx.mark_non_differentiable(*exposed)
    ctx.set_materialize_grads(False)  # zeros in the shape of every part would double them in backward
    return exposed


def _show(
    ctx: Any,
    plan: CallPlan,
    lossy: Sequence[Tensor | Deferred],
    saved: Sequence[list[Tensor]],
    exact: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
) -> None:
    """Show the observer which tensors a call stores."""
    assert watch.observer is not None
    assert plan.stored is not None
    others = [tensor for tensor in exact if tensor is not None]
    valued = plan.formula.codebook(plan.static, 2) is not None
    watch.observer.stored(plan.layer, tuple(lossy), plan.stored, tuple(saved), others, plan.spec.row, valued)
    never = tuple([plan.leaves_exact(tensor, inputs) for tensor in lossy])
    ctx.seen = never, tuple([tensor is not None for tensor in inputs])


def _gradients(ctx: Any, plan: CallPlan, grad: Tensor) -> Grads:
    """Restore the saved tensors and return the formula's gradients, one (or None) for each of its inputs."""
    tensors, first = ctx.saved_tensors, 0
    assert plan.stored is not None
    lossy: list[SavedTensor] = []
    for how in plan.stored:
        lossy.append(saved_tensor(tensors[first : first + how.parts], how, plan.spec))
        first += how.parts
    saved = Saved(plan.static, plan.needs, lossy, tensors[first:])
    if watch.observer is not None and watch.observer.wants_tensors:
        saved = saved._replace(lossy=[SavedTensor.of(tensor.whole()) for tensor in lossy])
        watch.observer.backward(Replay(ctx, plan, saved, grad))
    return plan.formula.backward(saved, grad)


apply_plan: Any = super(torch.autograd.Function, Apply).apply  # pyright: ignore[reportAttributeAccessIssue]
"""`Apply.apply` for eager code without transforms of `torch.func`: it does not look for them."""


def applied(plan: CallPlan, memories: Memories | None, key: Tensor, *tensors: Tensor | None) -> Any:
    """Return `Apply.apply` of a plan, in eager or traced code."""
    if torch.compiler.is_compiling():
        once, positions = distinct(tensors)
        if len(once) < len(tensors):
            plan, tensors = plan._replace(positions=tuple(positions)), tuple(once)
    elif not torch._C._are_functorch_transforms_active():
        return apply_plan(plan, memories, *tensors, key)
    return Apply.apply(plan, memories, *tensors, key)  # type: ignore[no-untyped-call]


def run(
    plan: CallPlan,
    memories: Memories | None,
    key: Tensor,
    tensors: Tensors,
    sources: Sources,
    traced: Traced | None = None,
    recipe: Recipe | None = None,
) -> Any:
    """Return the output of a call as planned, which rematerializes inputs from `sources`.

    If the plan exposes the output, remember its recipe (`recipe`, if it is known already).
    """
    # Detached: they get no gradient here, and a backward must not reach the graphs of other layers.
    made = [index for index, recipe in enumerate(plan.recipes) if recipe is not None]
    extra = [tensor.detach() for index in made for tensor in sources[index].tensors]
    returned = applied(plan, memories, key, *tensors, *extra)
    if plan.exposes is None or isinstance(returned, Tensor):
        return returned
    y, *parts = returned
    plan = plan.predicted(tensors, parts) if torch.compiler.is_compiling() else y.grad_fn.plan
    recipe = recipe or plan.recipe(tensors, sources, y)
    remember(y, Source(recipe, tuple(plan.ingredients(tensors, sources, parts))), traced)
    return y


def _undefined(layer: str) -> RunError:
    return RunError(
        f"backward with create_graph=True reached {layer!r}, which saves a compressed copy.\n"
        "Second derivatives of compressed layers are not defined; "
        "give that layer `enable: False`, or mt.revert(model).\n"
        "A profile has no such rule: leave the second derivative out of its loss()."
    )


SEQUENCES = (tuple, list, torch.Size)
MISS = object()
"""What is returned in place of an output where no plan is cached."""

Question = Callable[[Any, Any], Any]
"""What a plan goes by besides arguments and their geometry: `question(context, tensor)`."""

Lookup = Callable[[Tensor], Sequence[Tensor] | None]
"""What finds tensors by another one, to be passed to the formula with it."""


@dataclass(frozen=True, eq=False, slots=True)
class CachedCall:
    """The `plan` of a call (None: it is plain), and what other arguments must be like for it.

    `signature`: the function, the number of positional arguments, and the names of keywords. Positions are
    those among the arguments, the values of keywords and a None, then the elements of arguments that are
    sequences of tensors (`sequences`: their positions, types and lengths), then what `lookups` find. `alike`
    compares the `tensors`; `repeats` are positions of one tensor. `pick` takes the plan's tensors; of the
    `candidates` among them, `recipes` tell which are made again; `recipe` makes the output again.
    """

    signature: tuple[Any, ...]
    sequences: Sequence[tuple[int, type, int]]
    tensors: Callable[[Sequence[Any]], Sequence[Any]]
    alike: Callable[..., bool]
    repeats: Sequence[tuple[int, int]]
    constants: Sequence[tuple[int, Any]]
    autocast: tuple[str, torch.dtype] | None
    lookups: Sequence[tuple[Lookup, int, bool]]
    answers: Sequence[tuple[Question, int, Any]]
    plan: CallPlan | None
    pick: Callable[[Sequence[Any]], Sequence[Any]]
    key: Tensor | None
    memories: Memories | None
    candidates: Sequence[int]
    recipes: Sequence[Recipe | None]
    recipe: Recipe | None

    def run(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], context: Any
    ) -> Any:
        """Return the output for other arguments; `MISS` if they are not alike."""
        if (func, len(args), *kwargs) != self.signature:
            return MISS
        given = (*args, *kwargs.values(), None)
        values = self._with_elements(given) if self.sequences else given
        if values is None or not self.alike(*self.tensors(values)):
            return MISS
        values = self._with_lookups(values) if self.lookups else values
        if values is None or not self._agrees(values, context):
            return MISS
        plan = self.plan
        if plan is None:
            return func(*args, **kwargs)
        if self.candidates or plan.exposes is not None:
            return self._derived(plan, self.pick(values))
        return apply_plan(plan, self.memories, *self.pick(values), self.key)

    def _with_elements(self, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the arguments and the elements of sequences; None if those are not alike."""
        for index, kind, length in self.sequences:
            if type(given[index]) is not kind or len(given[index]) != length:
                return None
            given += tuple(given[index])
        return given

    def _with_lookups(self, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the arguments and what is found by them; None if that is not alike."""
        for look, index, missing in self.lookups:
            tensors = look(given[index])
            if (tensors is None) is not missing:
                return None
            given += tuple(tensors or ())
        return given

    def _agrees(self, given: Sequence[Any], context: Any) -> bool:
        """Return whether all but the tensors' own properties is the same."""
        if self.autocast is not None and torch.get_autocast_dtype(self.autocast[0]) is not self.autocast[1]:
            return False
        for index, value in self.constants:
            other = given[index]
            if other is not value and not _is_same(value, other):
                return False
        if self.repeats and not all(given[index] is given[first] for index, first in self.repeats):
            return False
        for question, index, answer in self.answers:  # noqa: SIM110 (a generator takes longer)
            if question(context, given[index]) is not answer:
                return False
        return True

    def _derived(self, plan: CallPlan, tensors: Sequence[Any]) -> Any:
        """Return the output of a call that makes inputs again, or lets others do so."""
        sources = {i: source for i in self.candidates if (source := find(tensors[i], None)) is not None}
        if [sources[i].recipe if i in sources else None for i in self.candidates] != self.recipes:
            return MISS
        assert self.key is not None
        return run(plan, self.memories, self.key, tensors, sources, recipe=self.recipe)


CachedCalls = dict[Hashable, tuple[CachedCall, ...]]


def run_cached(
    calls: CachedCalls, layer: Hashable, func: Callable[..., Any], args: Any, kwargs: Any, context: Any
) -> Any:
    """Return the output of a call by a cached plan of its layer; `MISS` if there is none for it."""
    for cached in calls.get(layer, ()):
        output = cached.run(func, args, kwargs, context)
        if output is not MISS:
            return output
    return MISS


def _is_same(value: Any, other: Any) -> bool:
    if type(other) is not type(value) or other != value:
        return False
    if type(value) in SEQUENCES:
        return all(map(_is_same, value, other))
    return bool(value != 0 or str(other) == str(value))  # zeros have signs
