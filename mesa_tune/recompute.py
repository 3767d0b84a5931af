"""Modules that keep their packed inputs alone and run again in backward: `store: recompute` (`on module:`).

What is hard is that the second run must be the first one again: under the same random and autocast states,
with buffers that do not move a second time. Parameters are inputs of the node, so that their gradients arrive
the usual way (hooks, `torch.autograd.grad`), and not from a backward inside a backward.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from mesa_tune.codecs import Spec
from mesa_tune.errors import RunError
from mesa_tune.functional.keeping import Meta, keep, restore
from mesa_tune.notice import warn_once

Run = Callable[..., Any]


class Job(NamedTuple):
    """A module's run: `first(*args, **kwargs)` now, `again(*args, **kwargs)` in backward.

    `is_static` names tensors that are kept as they are; `key` is the noise key for those that are encoded.
    """

    name: str
    module: nn.Module
    spec: Spec
    first: Run
    again: Run
    is_static: Callable[[Tensor], bool]
    key: Callable[[torch.device], Tensor]


def recomputed(job: Job, args: Any, kwargs: Any) -> Any:
    """The module's output; of what the run made, only the packed inputs are kept."""
    if torch.compiler.is_compiling():
        warn_once(
            f"mesa-tune: `store: recompute` of {job.name!r} has no effect in compiled code, "
            "where its layers store by their own settings."
        )
        return job.first(*args, **kwargs)
    leaves, form = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    parameters = [each for each in job.module.parameters() if each.requires_grad]
    if not parameters and not any(leaves[place].requires_grad for place in places):
        return job.first(*args, **kwargs)
    inputs = _Inputs(job, leaves, form, places)
    found = _Recomputed.apply(inputs, *(leaves[place] for place in places), *parameters)  # type: ignore[no-untyped-call]
    assert inputs.output is not None
    return inputs.output.filled(found)


class _Output(NamedTuple):
    """What a run returned, its tensors taken out."""

    leaves: list[Any]
    form: TreeSpec
    places: list[int]

    @staticmethod
    def of(value: Any) -> "tuple[_Output, list[Tensor]]":
        leaves, form = tree_flatten(value)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[place] for place in places]
        return _Output(
            [None if place in places else leaf for place, leaf in enumerate(leaves)], form, places
        ), tensors

    def filled(self, tensors: Any) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.form)


class _Inputs:
    """A run's arguments without their tensors, and the states to put back."""

    def __init__(self, job: Job, leaves: list[Any], form: TreeSpec, places: list[int]) -> None:
        self.job, self.form, self.places = job, form, places
        self.leaves = [None if place in places else leaf for place, leaf in enumerate(leaves)]
        self.output: _Output | None = None
        self.device = next((leaves[place].device for place in places), torch.device("cpu"))
        self.random = _random_state(self.device)
        self.autocast = [_Autocast.of(kind) for kind in dict.fromkeys(("cpu", self.device.type))]

    def arguments(self, tensors: list[Tensor]) -> tuple[Any, Any]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.form)
        return args, kwargs


class _Recomputed(torch.autograd.Function):
    """`apply(inputs, *tensors, *parameters)`: the run's output tensors."""

    @staticmethod
    def forward(ctx: Any, inputs: _Inputs, *tensors: Tensor) -> tuple[Tensor, ...]:
        job, given = inputs.job, list(tensors[: len(inputs.places)])
        stored = [_kept(job, tensor) for tensor in given]
        versions = [tensor._version for tensor in given]
        args, kwargs = inputs.arguments(given)
        inputs.output, outputs = _Output.of(job.first(*args, **kwargs))
        if versions != [tensor._version for tensor in given]:
            raise RunError(
                f"{job.name!r} changes its input in place, so it cannot be run again from it\n"
                "give a module around it, or one without the in-place operation, `store: recompute`"
            )
        ctx.inputs, ctx.metas = inputs, [meta for _, meta in stored]
        ctx.wanted = [tensor.requires_grad for tensor in given]
        ctx.save_for_backward(*(part for parts, _ in stored for part in parts), *tensors[len(given) :])
        ctx.mark_non_differentiable(*(each for each in outputs if not each.is_floating_point()))
        # A module may return what it got: autograd would take that for an in-place result.
        return tuple(each.view_as(each) if any(each is one for one in given) else each for each in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs: _Inputs = ctx.inputs
        if torch.is_grad_enabled():
            raise RunError(
                f"backward with create_graph=True reached {inputs.job.name!r}, which runs again\n"
                "give it `enable: False`, or mt.revert(model)"
            )
        saved, again = list(ctx.saved_tensors), []
        for meta, wanted in zip(ctx.metas, ctx.wanted, strict=True):
            tensor = restore([saved.pop(0) for _ in range(meta.parts)], meta, inputs.job.spec)
            again.append(tensor.detach().requires_grad_(wanted))
        with _replaying(inputs):
            args, kwargs = inputs.arguments(again)
            _, outputs = _Output.of(inputs.job.again(*args, **kwargs))
        pairs = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if y.requires_grad]
        wanted = [*(each for each in again if each.requires_grad), *saved]
        found = iter(
            torch.autograd.grad([y for y, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)
            if pairs
            else [None] * len(wanted)
        )
        return (None, *(next(found) if each.requires_grad else None for each in again), *found)


def _kept(job: Job, tensor: Tensor) -> tuple[list[Tensor], Meta]:
    return keep(tensor.detach(), job.spec, job.key(tensor.device), raw=job.is_static(tensor), layer=job.name)


class _Autocast(NamedTuple):
    kind: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def of(kind: str) -> "_Autocast":
        return _Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def _replaying(inputs: _Inputs) -> Iterator[None]:
    """The states of the first run, with gradients; what they were, and the buffers, back at the end."""
    host, device = inputs.random
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for kind, enabled, dtype in inputs.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        stack.enter_context(torch.random.fork_rng(devices=[] if device is None else [inputs.device]))
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device, inputs.device)
        stack.enter_context(_spare_buffers(inputs.job.module))
        yield


@contextmanager
def _spare_buffers(module: nn.Module) -> Iterator[None]:
    """The body works on copies of the module's buffers."""
    owners = [each for each in module.modules() if each._buffers]
    before = [dict(owner._buffers) for owner in owners]
    for owner in owners:
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for owner, buffers in zip(owners, before, strict=True):
            owner._buffers.update(buffers)
