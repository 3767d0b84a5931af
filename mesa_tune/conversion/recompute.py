"""Modules that save only their packed inputs, and run again in backward: `store: recompute` (`on module:`),
and `tile`, in slices.

PyTorch's non-reentrant checkpoint runs a module again, under torch's random and autocast states of the first
run. The saved-tensor hooks through which it saves its inputs pack them. What is hard is that the second run
must be like the first. So it sees the Python state of the first one, and leaves no changes of its own
(`python_state`). A module that computes shapes, indices or branches from its input (the routing of a mixture
of experts) gets that input back exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from mesa_tune.codecs import Spec
from mesa_tune.conversion.caches import without_new_caches
from mesa_tune.conversion.choices import ChoiceDetector
from mesa_tune.conversion.hooks import naming
from mesa_tune.conversion.python_state.hooks import has_foreign_hooks
from mesa_tune.conversion.python_state.watch import Snapshot, Watch
from mesa_tune.conversion.sliced import Arguments, Cut, cut_of, refuse_slices, warn_of_effect
from mesa_tune.engine.function import saving_in_vain
from mesa_tune.engine.observer import watch
from mesa_tune.engine.registry import is_selective
from mesa_tune.engine.routing import inside_backward
from mesa_tune.engine.storage import as_is, decided, restore, store
from mesa_tune.engine.wrappers import opened
from mesa_tune.errors import RunError
from mesa_tune.notice import warn_once
from mesa_tune.ops import as_int64

Run = Callable[..., Any]


class Job(NamedTuple):
    """How to run a module: `plain(*args, **kwargs)` where it cannot run twice, else `run(args, kwargs)`.

    `packs`: its inputs are packed; else the surrounding hooks save them. `is_static` tells which tensors are
    never encoded; `key` returns the noise key of the others. `is_new`: not all layers of the model are known
    yet. `watch`: of the module's Python state. `probe`: as `plain`, without gradients, for a run that is none
    of the model's.
    """

    name: str
    module: nn.Module
    spec: Spec
    plain: Run
    run: Run
    packs: bool
    is_static: Callable[[Tensor], bool]
    key: Callable[[torch.device], Tensor]
    is_new: bool
    watch: Watch
    probe: Run


def recomputed(job: Job, args: Any, kwargs: Any) -> Any:
    """Return the module's output; of all tensors in the module, autograd saves only its inputs.

    With `tile`, it runs on slices of its input, each of which saves its own.
    """
    if torch.compiler.is_compiling():
        warn_once(
            f"mesa-tune: `store: recompute` of {job.name!r} has no effect in compiled code, "
            "where its layers store by their own settings."
        )
        return job.plain(*args, **kwargs)
    given = without_new_caches(job.module, args, kwargs)
    if given is None:
        warn_once(f"mesa-tune: {job.name!r} does not run again: its cache has keys of an earlier forward.")
        return job.plain(*args, **kwargs)
    args, kwargs = given
    leaves, form = tree_flatten((args, kwargs))
    before = job.watch.begin(leaves)
    if job.watch.obstacle is not None:
        warn_once(f"mesa-tune: {job.name!r} does not run again: nobody can put back {job.watch.obstacle}.")
        return job.plain(*args, **kwargs)
    cut = _cut(job, before, args, kwargs) if job.spec.tile > 1 else None
    if cut is not None:
        outputs = _in_slices(job, before, cut)
        if outputs is not None:
            return cut.joined(outputs)
    output = _recomputed(job, before, (args, kwargs), leaves, form)
    job.watch.end(before)
    return output


def _cut(job: Job, before: Snapshot, args: Any, kwargs: Any) -> Cut | None:
    """Return how the input of a module is cut into slices; None if it is not, with a warning."""
    if has_foreign_hooks(job.watch.below):
        warn_of_effect(job.name, "hooks inside it would run once per slice")
        return None
    if is_selective():
        warn_of_effect(job.name, "selective checkpointing around it counts its operators")
        return None

    @contextmanager
    def leaving_nothing() -> Iterator[None]:
        devices, _ = get_device_states(*tree_leaves((args, kwargs)))
        with before.again(job.watch), torch.random.fork_rng(devices):
            yield

    return cut_of(job.module, job.name, job.spec.tile, job.probe, leaving_nothing, args, kwargs)


def _in_slices(job: Job, before: Snapshot, cut: Cut) -> list[Any] | None:
    """Return the outputs of slices; None, with a warning, where these change what the whole changes once.

    The first slice may make a cache, which the others find.
    """
    random = torch.get_rng_state(), get_device_states(*cut.tensors)
    first, *others = cut.slices(job.spec.tile)
    outputs = [_recomputed(job, before, first, *tree_flatten(first))]
    cached = job.watch.now()
    for number, part in enumerate(others, 1):
        own_key = partial(_key_of_slice, job.key, number)
        outputs.append(_recomputed(job._replace(key=own_key), before, part, *tree_flatten(part)))
    changed = any(map(cut.is_changed, (first, *others)))
    effect = "a container in its arguments" if changed else job.watch.now().difference(cached)
    if effect is None:
        job.watch.end(before)
        return outputs
    outputs.clear()
    before.undo()
    torch.set_rng_state(random[0])
    set_device_states(*random[1])
    refuse_slices(job.module, job.name, f"each slice would change {effect}")
    return None


def _key_of_slice(key: Callable[[torch.device], Tensor], number: int, device: torch.device) -> Tensor:
    """Return a key of its own for each slice, none of which is another forward's."""
    return key(device) + as_int64(number * 0xD6E8FEB86659FD93)


def _recomputed(job: Job, before: Snapshot, given: Arguments, leaves: Sequence[Any], form: TreeSpec) -> Any:
    """Return the output for arguments, which are also given as `leaves` and their form."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    detector = ChoiceDetector([tensor for tensor in tensors if not tensor.requires_grad])
    # The first run saves others in place of tensors that it does not encode: only their number is checked.
    run_twice = partial(
        checkpoint,
        _Body(job, before, given, form, detector),
        *leaves,
        use_reentrant=False,
        determinism_check="none",
    )
    if not job.packs:
        return run_twice()
    versions, inputs = [tensor._version for tensor in tensors], _Inputs(job)
    with saved_tensors_hooks(inputs.pack, inputs.unpack):
        output = run_twice()
    if versions != [tensor._version for tensor in tensors]:
        raise RunError(
            f"{job.name!r} changes its input in place, so it cannot be run again from it\n"
            "give a module around it, or one without the in-place operation, `store: recompute`"
        )
    inputs.store(exact=detector.detected)
    return output


class _Body:
    """The function that the checkpoint runs twice, the first time under `detector`.

    `first`: the arguments of that run. Containers in them are the caller's: the second run gets others.
    """

    def __init__(
        self, job: Job, before: Snapshot, first: Arguments, form: TreeSpec, detector: ChoiceDetector
    ) -> None:
        self.job, self.before, self.form, self.detector = job, before, form, detector
        self.first: Arguments | None = first

    def __call__(self, *leaves: Any) -> Any:
        first, self.first = self.first, None
        if first is not None:
            with self.detector, saving_in_vain(), naming() if self.job.is_new else nullcontext():
                return self.job.run(*first)
        args, kwargs = tree_unflatten(leaves, self.form)
        with self.before.again(self.job.watch):
            return self.job.run(args, kwargs)


class _Input:
    """A saved input: the tensor itself until it is stored. `like`: see `opened`."""

    __slots__ = ("exact", "like", "packing", "parts", "spec", "version")

    def __init__(self, given: Tensor, exact: bool, spec: Spec) -> None:
        tensor, self.like = opened(given.detach())
        self.parts, self.exact, self.spec = [tensor], exact, spec.within(input_row(tensor))
        self.packing = as_is(tensor.shape, tensor.dtype)
        self.version = tensor._version


class _Inputs:
    """The saved inputs of one run, packed after it: only then `ChoiceDetector` can tell which may be."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.saved: list[_Input] = []

    def pack(self, tensor: Tensor) -> _Input:
        """Return what to save for `tensor`; one without a gradient (a mask, positions) stays exact."""
        with torch._C.DisableTorchFunction():  # our own torch calls are no calls of the model
            exact = not tensor.requires_grad or self.job.is_static(tensor)
            saved = _Input(tensor, exact, self.job.spec)
        self.saved.append(saved)
        return saved

    def store(self, exact: bool) -> None:
        """Pack the inputs, or leave them all `exact`."""
        with torch._C.DisableTorchFunction():
            for saved in self.saved:
                self._store(saved, exact or saved.exact)
        self.saved = []

    def _store(self, saved: _Input, exact: bool) -> None:
        (tensor,) = saved.parts
        packing = decided(tensor, saved.spec, self.job.name, exact)
        saved.parts = store(tensor, packing, saved.spec, self.job.key(tensor.device))
        saved.packing = packing.in_parts(len(saved.parts))
        saved.version = saved.parts[0]._version
        if watch.observer is not None:
            parts, row = (saved.parts,), saved.spec.row
            watch.observer.stored(self.job.name, (tensor,), (saved.packing,), parts, [], row)

    def unpack(self, saved: _Input) -> Tensor:
        """Return the input for the second run."""
        if torch.is_grad_enabled() and inside_backward():
            raise RunError(
                f"backward with create_graph=True reached {self.job.name!r}, which runs again\n"
                "give it `enable: False`, or mt.revert(model)"
            )
        if saved.parts[0]._version != saved.version:
            raise RunError(
                f"an input of {self.job.name!r} was changed in place after its forward, so it cannot be run "
                "again from it\ngive a module around both `store: recompute`, or change a copy"
            )
        return saved.like(restore(saved.parts, saved.packing, saved.spec))


def input_row(tensor: Tensor) -> int:
    """Return the number of elements that no group of a module's packed input crosses; 0: there is no limit.

    Rows are those of tokens `(*, width)`. Most modules normalize their input row by row: a row of small
    numbers must not have the range of a larger one.
    """
    return tensor.shape[-1] if tensor.dim() in (2, 3) else 0
