"""A fake process group, in which fake steps of data-parallel training run as its first process would.

What is hard: DDP and FSDP2 compute sizes, ranks and bucket indices in integer tensors whose values they read,
while weights, buckets and gathered parameters are fake. So the integers that they make for themselves are
real. And there may be a real group already: torch has one default group per process, so the fake one replaces
it for a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mesa_tune.errors import WorkloadError
from mesa_tune.measure.memory.meter import Meter
from mesa_tune.workload.user_code import explaining, located

_GROUPS = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
"""Tables of process groups in `torch.distributed.distributed_c10d`."""
_FIRST_NAME = 1 << 30
"""Number of the first fake group. Names of groups are numbers, which count up from 0."""

Parallelize = Callable[[nn.Module], nn.Module | None]
"""A function that wraps a model for data-parallel training; None: it has wrapped the model in place."""


@dataclass(frozen=True)
class Parallelization:
    """How the model is wrapped: `parallelize(model)`, in a group of `world_size` processes.

    Raise WorkloadError for values that make no sense.
    """

    parallelize: Parallelize
    world_size: int

    def __post_init__(self) -> None:
        if not callable(self.parallelize):
            raise WorkloadError(
                f"parallelize = {self.parallelize!r}: must be a function of the model\n"
                "give DistributedDataParallel, or a function that calls fully_shard"
            )
        if type(self.world_size) is not int or self.world_size < 1:
            raise WorkloadError(
                f"world_size = {self.world_size!r}: must be an integer of at least 1\n"
                "give the number of processes that train together"
            )
        if not distributed.is_available():
            raise WorkloadError("parallelize: this build of torch has no torch.distributed")

    @contextmanager
    def wrapped(self, model: nn.Module, meter: Meter) -> Iterator[nn.Module]:
        """Yield the fake `model`, wrapped. In the body this process is rank 0 of a fake group.

        `meter` counts what is made in the body. While it runs, no other thread may use a process group.
        """
        collectives = _FakeCollectives()
        with ExitStack() as stack:
            stack.enter_context(_fake_group(self.world_size))
            stack.enter_context(_unseen_shapes())
            stack.enter_context(collectives.rebuilding_buckets())
            stack.enter_context(collectives)
            stack.enter_context(meter)
            yield self._wrapped(model, collectives)

    def _wrapped(self, model: nn.Module, collectives: _FakeCollectives) -> nn.Module:
        with explaining("parallelize()", self.parallelize), collectives.bookkeeping():
            wrapped: object = self.parallelize(model)
        if wrapped is None:
            return model
        if not isinstance(wrapped, nn.Module):
            raise WorkloadError(
                f"{located(self.parallelize)}: "
                f"parallelize() returned a {type(wrapped).__name__}, not an nn.Module\n"
                "return the wrapped model, or None if it is wrapped in place"
            )
        return wrapped


class _FakeCollectives(TorchDispatchMode):
    """Runs collectives of fake tensors, and the bookkeeping of DDP and FSDP2 on real integers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._real_integers = False

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Make integer tensors of the body real."""
        self._real_integers = True
        try:
            yield
        finally:
            self._real_integers = False

    def rebuilding_buckets(self) -> Any:
        """Return a context in which DDP's reducer can put its buckets into the order of the gradients."""
        reducers = _native().Reducer
        rebuild = reducers._rebuild_buckets

        def rebuilt(reducer: Any) -> bool:
            with self.bookkeeping():
                return bool(rebuild(reducer))

        return patch.object(reducers, "_rebuild_buckets", rebuilt)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.ops.c10d.allreduce_.default:  # the fake group's result has no tensors
            return args[0], _finished(args[0])
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **given)
        if tensors or (self._real_integers and _makes_integers(func, given)):
            with unset_fake_temporarily():
                return func(*args, **given)
        return func(*args, **given)


def _unseen_shapes() -> Any:
    """Return a context in which no meter sees the fake tensors that DTensor infers shapes with.

    They have the sizes of whole parameters, and exist once for each operation.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    infer: Any = ShardingPropagator._propagate_tensor_meta_non_cached

    def inferred(propagator: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return infer(propagator, schema)

    return patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", inferred)


def _native() -> Any:
    """Return the extension module of `torch.distributed`, whose stubs lack most of it."""
    return import_module("torch._C._distributed_c10d")


def _makes_integers(func: Any, options: dict[str, Any]) -> bool:
    dtype = options.get("dtype")
    integers = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    return integers or (dtype is None and func.overloadpacket is torch.ops.aten.arange)


def _finished(tensors: list[Tensor]) -> Any:
    """Return the handle of a collective that has ended, with these results."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return _native()._create_work_from_future(future).boxed()


@contextmanager
def _fake_group(world_size: int) -> Iterator[None]:
    """Make the default process group a fake one, whose collectives do nothing, for the body."""
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    with ExitStack() as stack:
        for name in _GROUPS:
            stack.enter_context(patch.dict(getattr(c10d, name), clear=True))
        for name in ("_backend", "_default_pg_init_method"):
            stack.enter_context(patch.object(c10d, name, None))
        stack.enter_context(patch.object(c10d, "_world", c10d._World()))
        stack.enter_context(patch.object(c10d, "_group_count", _FIRST_NAME))
        stack.enter_context(patch.object(sys, "excepthook", sys.excepthook))
        stack.enter_context(patch.object(torch._C, "_get_accelerator", lambda *_: torch.device("cpu")))
        stack.callback(_forget_groups)
        distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        yield


def _forget_groups() -> None:
    """Remove the groups of the present world from the registry, in which all worlds are."""
    from torch.distributed import distributed_c10d as c10d

    for group in c10d._world.pg_map:
        _native()._unregister_process_group(group.group_name)
