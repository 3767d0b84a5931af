"""Recorded backwards of single calls, run again with their saved tensors stored under other settings.

What is hard: tensors that several calls save must be stored once, and their time counted once (Rule 3).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from mesa_tune.codecs import Spec
from mesa_tune.codecs.rows import expected_square
from mesa_tune.engine.observer import Replay
from mesa_tune.engine.registry import registry
from mesa_tune.engine.storage import decided, restore, store
from mesa_tune.policy.settings import MIN_ELEMENTS

Floats = NDArray[np.float64]
Difference = dict[nn.Parameter, Tensor]
"""Changes of parameter gradients."""


@dataclass
class Draw:
    """Result of one option of one layer with one rounding seed. None: not measured.

    Errors are pairs, relative to the gradient and beside own noise: of the layer's own parameter gradients
    (`local`), of all parameter gradients (`total`); `joint`: the same for all sharers. `squares`: ‖ĝ − g‖² of
    each part, of which `total` is. `sent`: squared norm of the changes of input gradients. `bias`: inner
    products of the changes with two rounding seeds, as `local` and as `sent`. `senders`: the layers whose
    input gradients change.
    """

    tensor_error: float = 0.0
    local: Floats = field(default_factory=lambda: np.zeros(2))
    sent: float = 0.0
    total: Floats | None = None
    squares: Floats | None = None
    joint: Floats | None = None
    bias: tuple[Floats, float] | None = None
    senders: set[str] = field(default_factory=set)
    encode_ms: float = 0.0
    decode_ms: float = 0.0

    @property
    def sender(self) -> str | None:
        """The layer whose input gradients change, if it is the only one."""
        return next(iter(self.senders)) if len(self.senders) == 1 else None


@dataclass
class Changes:
    """Changes of gradients by one option of one layer with one rounding seed, and what is measured on them.

    `final`: of parameter gradients. `sent`: of input gradients, with the edge of the graph that each goes to.
    """

    draw: Draw = field(default_factory=Draw)
    final: Difference = field(default_factory=dict)
    sent: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)

    def sent_products(self, other: Changes) -> float:
        """Return the inner product of `sent` with that by another seed."""
        edges = {(edge.node, edge.output_nr): delta for edge, delta in other.sent}
        sent = [
            (delta, edges[edge.node, edge.output_nr])
            for edge, delta in self.sent
            if (edge.node, edge.output_nr) in edges
        ]
        real = ((as_real(a).float(), as_real(b).float()) for a, b in sent)
        return sum((a * b).sum().item() for a, b in real)


@dataclass(frozen=True)
class DecodedCopy:
    """A decoded tensor, the squared norms of its change and of the original, and the times this took."""

    tensor: Tensor
    change: float
    size: float
    encode_ms: float
    decode_ms: float


@dataclass
class CopyCache:
    """Decoded copies for one option and one seed.

    `tries`: how often each is stored and restored for its times. `sizes`: squared norms of the tensors.
    """

    tries: int = 1
    sizes: dict[Any, float] = field(default_factory=dict)
    copies: dict[Any, DecodedCopy] = field(default_factory=dict)

    def copy(self, tensor: Tensor, spec: Spec, seed: Tensor) -> DecodedCopy:
        """Return the decoded copy of `tensor`; one from the cache takes no time (Rule 3)."""
        place = tensor.data_ptr(), tensor.shape, tensor.stride()
        key = place, spec.group_size, spec.axis, spec.codebook
        if key in self.copies:
            return replace(self.copies[key], encode_ms=0.0, decode_ms=0.0)
        if place not in self.sizes:
            self.sizes[place] = squared_norm(tensor)
        copy, encode_ms, decode_ms = stored(tensor, spec, seed, self.tries)
        change = squared_norm(copy - tensor)
        self.copies[key] = DecodedCopy(copy, change, self.sizes[place], encode_ms, decode_ms)
        return self.copies[key]


class RecordedCall:
    """One call's exact backward, and how its gradients change under other settings."""

    def __init__(self, replay: Replay, coded: list[bool] | None = None) -> None:
        self.replay = replay
        self.lossy = list(replay.lossy)
        raw = zip(replay.exact_inputs, replay.lossy, strict=True)
        self.coded = coded or [not flag and tensor.numel() > MIN_ELEMENTS for flag, tensor in raw]
        alone = any(self.coded) and self.coded[0] and not any(self.coded[1:])
        skip = replay.formula.independent if alone else ()
        self.needs = tuple(need and index not in skip for index, need in enumerate(replay.needs))
        edges = iter(replay.node.next_functions)  # the last belongs to the noise key
        self.edges = [next(edges) if present else None for present in replay.present]
        self.exact: tuple[Tensor | None, ...] | None = None

    def differences(
        self,
        spec: Spec,
        seed: Tensor,
        cache: CopyCache,
        changes: Changes,
    ) -> None:
        """Add the changes of parameter gradients and of input gradients to `changes`."""
        if not any(self.coded):
            return
        self.store(spec, seed, cache, changes.draw)
        with torch.no_grad():
            if self.exact is None:
                self.exact = self.replay.run(self.replay.lossy, self.needs)
            changed = self.replay.run(self.lossy, self.needs)
            pairs = zip(self.edges, changed, self.exact, strict=True)
            deltas = [
                (edge, new - old)
                for edge, new, old in pairs
                if edge is not None and edge[0] is not None and new is not None and old is not None
            ]
            scale = self._expected_scale(spec, [delta for _, delta in deltas])
            for edge, delta in deltas:
                _add_or_send(edge, delta if scale == 1 else delta * scale, changes, self.replay.layer)

    def _expected_scale(self, spec: Spec, deltas: Sequence[Tensor]) -> float:
        """Return what makes the change by one sample of rows as large as it is expected to be; else 1."""
        spec = spec.along(self.replay.axis)
        x, grad = self.lossy[0], self.replay.grad
        rows_meet = x.dim() > 1 and grad.shape[:-1] == x.shape[:-1] and not any(self.coded[1:])
        size = squared_norm(*deltas) if spec.rows < 1 and spec.axis == -1 and rows_meet else 0.0
        if not 0 < size < math.inf:
            return 1.0
        expected = expected_square(self.replay.lossy[0], x, grad, spec)
        return math.sqrt(expected / size) if math.isfinite(expected) else 1.0

    def store(self, spec: Spec, seed: Tensor, cache: CopyCache, draw: Draw) -> None:
        """Put the decoded copies of saved tensors into `lossy`; small and raw ones stay exact."""
        positions = [position for position, coded in enumerate(self.coded) if coded]
        squares = [self._store_at(position, spec, seed, cache, draw) for position in positions]
        changes, sizes = sum(change for change, _ in squares), sum(size for _, size in squares)
        draw.tensor_error = max(draw.tensor_error, changes / sizes if sizes else 0.0)

    def _store_at(
        self, position: int, spec: Spec, seed: Tensor, cache: CopyCache, draw: Draw
    ) -> tuple[float, float]:
        """Store one saved tensor; return the squared norms of its change and of itself."""
        codebook = self.replay.formula.codebook(self.replay.saved.static, spec.levels)
        spec = spec.within(self.replay.row).along(self.replay.axis).valued(codebook)
        copy = cache.copy(self.replay.lossy[position], spec, seed)
        self.lossy[position] = copy.tensor
        draw.encode_ms, draw.decode_ms = draw.encode_ms + copy.encode_ms, draw.decode_ms + copy.decode_ms
        return copy.change, copy.size


def _add_or_send(edge: Any, delta: Tensor, changes: Changes, layer: str) -> None:
    parameter = getattr(edge[0], "variable", None)
    if isinstance(parameter, nn.Parameter):
        add(changes.final, {parameter: delta.to(parameter.dtype)})
    elif delta.any():
        changes.sent.append((GradientEdge(edge[0], edge[1]), delta))
        changes.draw.senders.add(layer)


TRIES = 3
"""How often a tensor is stored and restored for its times: the first time it may be out of the cache."""


def stored(tensor: Tensor, spec: Spec, seed: Tensor, tries: int = 1) -> tuple[Tensor, float, float]:
    """Return `tensor` encoded and decoded by `spec`, and the least milliseconds of encoding and decoding."""
    copy, encode_ms, decode_ms = _stored_once(tensor, spec, seed)
    for _ in range(tries - 1):
        _, encode, decode = _stored_once(tensor, spec, seed)
        encode_ms, decode_ms = min(encode_ms, encode), min(decode_ms, decode)
    return copy, encode_ms, decode_ms


def _stored_once(tensor: Tensor, spec: Spec, seed: Tensor) -> tuple[Tensor, float, float]:
    registry.clear()
    start = now(tensor)
    packing = decided(tensor, spec)
    parts = store(tensor, packing, spec, seed.to(tensor.device))
    middle = now(tensor)
    copy = restore(parts, packing, spec)
    return copy, 1e3 * (middle - start), 1e3 * (now(tensor) - middle)


def add(total: Difference, difference: Difference) -> None:
    """Add `difference` to `total` in place."""
    for parameter, delta in difference.items():
        total[parameter] = total[parameter] + delta if parameter in total else delta


def squared_norm(*tensors: Tensor) -> float:
    """Return the sum of the squares of all elements; of complex ones, of both parts."""
    # PyTorch sums in pairs: the rounding errors of float32 stay below 1e-7.
    return sum(as_real(tensor).float().square().sum().item() for tensor in tensors)


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, any other one as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def now(tensor: Tensor) -> float:
    """Return a moment in seconds, after the work on the device of `tensor`."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
        return time.perf_counter()
    return time.thread_time()  # without the time that other processes take
