"""A workload on fake tensors: every shape, dtype and storage of a real step, and no memory.

What is hard: a model is built by code that reads values (`linspace(…).tolist()`, rejection sampling in
initializers), which fake tensors do not have. So while a model is built, small tensors are real, and become
fake afterwards; so while a batch is made. A step that reads values is refused, with its line.
"""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mesa_tune.errors import WorkloadError
from mesa_tune.notice import warn_once
from mesa_tune.ops.flags import BytesOnly
from mesa_tune.workload.fake_mode import FastFakes
from mesa_tune.workload.step import TrainingStep
from mesa_tune.workload.user_code import explaining, lacks_values, seeded
from mesa_tune.workload.workload import Workload, in_training_mode

_REAL_WHILE_BUILDING = 1 << 16
"""Tensors of up to so many elements are real while a model is built."""


@dataclass(frozen=True)
class FakeWorkload(Workload):
    """A workload whose models, batches and losses are fake CPU tensors; use it inside `with faking():`.

    The loss's value is not checked. Every method raises WorkloadError where the user's code reads the values
    of tensors.
    """

    mode: BytesOnly = field(kw_only=True)

    @classmethod
    def of(cls, workload: Workload) -> FakeWorkload:
        """Return `workload` on fake tensors."""
        values = {each.name: getattr(workload, each.name) for each in fields(Workload)}
        return cls(**{**values, "device": "cpu"}, mode=FastFakes())

    @contextmanager
    def faking(self) -> Iterator[None]:
        """Make the tensors of the body fake. What exists before is no work for the garbage collector.

        `copy.deepcopy` asks a parameter's address, and PyTorch warns that a fake one has none.
        """
        unfrozen = not gc.get_freeze_count()
        if unfrozen:
            gc.freeze()
        try:
            with self.mode, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                yield
        finally:
            if unfrozen:
                gc.unfreeze()

    @property
    def training_step(self) -> TrainingStep:
        """What a training step is made of, without a GradScaler: that decides by values."""
        return replace(super().training_step, scaler=False)

    def build(self) -> nn.Module:
        """Build a fake model, in training mode; the caller's random states do not change."""
        explained = explaining("model()", self.model, self.path)
        with seeded(self.seed, self.device), explained, _building(self.mode):
            model: Any = self.model()
        if not isinstance(model, nn.Module):
            return super().build()  # raises the error of a model() that returns something else
        _warn_of_recurrent(model)
        return in_training_mode(faked_module(self.mode, model))

    def make_batch(self, n: int | None = None, *, draw: int = 0) -> Any:
        """Make a fake batch; for real first, where that reads the values of large tensors."""
        try:
            with _building(self.mode):
                batch = super().make_batch(n, draw=draw)
        except WorkloadError as error:
            if not lacks_values(error.__cause__):
                raise
            with unset_fake_temporarily():
                batch = super().make_batch(n, draw=draw)
        return tree_map_only(Tensor, lambda tensor: faked(self.mode, tensor), batch)

    def compute_loss(self, model: nn.Module, batch: Any, *, check: bool = True) -> Tensor:
        """Return the fake loss; its value is never checked."""
        with _positions_follow(batch):
            return super().compute_loss(model, batch, check=False)


@contextmanager
def _positions_follow(batch: Any) -> Iterator[None]:
    """Let transformers know that positions which a model counts itself pack no sequences into one.

    It asks their values, and makes a mask where they are fake. Positions of the batch may pack some.
    """
    masks = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if masks is None or not hasattr(masks, name):
        yield
        return
    find = getattr(masks, name)
    given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}

    def found(position_ids: Tensor) -> Tensor | None:
        is_given = position_ids.untyped_storage()._cdata in given
        packed: Tensor | None = find(position_ids) if is_given else None
        return packed

    with patch.object(masks, name, found):
        yield


def faked(mode: BytesOnly, tensor: Tensor) -> Tensor:
    """Return a fake CPU tensor of the same geometry; `tensor` itself if it is one. Views share a storage."""
    if isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
        return tensor
    fake = mode.from_tensor(tensor)
    if fake.device.type == "cpu":
        return fake
    with mode:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return empty.requires_grad_(tensor.requires_grad) if tensor.is_leaf else empty


def fake_copy(mode: BytesOnly, model: nn.Module) -> nn.Module:
    """Return a deep copy of `model` whose parameters and buffers are fake: no memory, and no change to it."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): _faked_like(mode, tensor) for tensor in tensors})


def faked_module(mode: BytesOnly, model: nn.Module) -> nn.Module:
    """Replace the parameters and buffers of `model` by fake ones; tied ones stay tied."""
    known: dict[int, Tensor] = {}
    for module in model.modules():
        groups: Any = (module._parameters, module._buffers)
        for tensors in groups:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = known.setdefault(id(tensor), _faked_like(mode, tensor))
    return model


def _faked_like(mode: BytesOnly, tensor: Tensor) -> Tensor:
    fake = faked(mode, tensor)
    if not isinstance(tensor, nn.Parameter) or isinstance(fake, nn.Parameter):
        return fake
    return nn.Parameter(fake.detach(), tensor.requires_grad)


class _Building(TorchDispatchMode):
    """Runs an operation for real if all its tensors are real, or if it makes a small one of none."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        taken = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in taken):
            return func(*args, **given)
        if not taken:
            fake = func(*args, **given)
            if isinstance(fake, Tensor) and fake.numel() > _REAL_WHILE_BUILDING:
                return fake
        with unset_fake_temporarily():
            return func(*args, **given)


def _untruncated(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    return tensor


def _set_data(tensor: Tensor, converted: Tensor) -> None:
    """Give `tensor` the data of `converted`, as modules do that convert parameters which are not fake.

    Fake ones they swap, which PyTorch 2.13 refuses: it holds weak references to them itself.
    """
    tensor.data = converted.detach()


@contextmanager
def _building(mode: BytesOnly) -> Iterator[None]:
    """Make new tensors fake, except small ones; leave out the initializer that rejects by values."""
    untruncated = patch.object(torch.nn.init, "_no_grad_trunc_normal_", _untruncated)
    converting = patch.object(torch.utils, "swap_tensors", _set_data)
    with mode, _Building(), untruncated, converting:  # type: ignore[no-untyped-call]
        yield


def _warn_of_recurrent(model: nn.Module) -> None:
    """Warn if the model has an LSTM: on fake tensors PyTorch runs an implementation that saves less."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.LSTM)]
    if names:
        warn_once(
            f"mesa-tune: bytes of {', '.join(map(repr, names[:3]))} are estimated too low, because an LSTM "
            "saves more on real tensors than on fake ones: profile it with real steps"
        )
