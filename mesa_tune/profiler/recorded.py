"""Backwards of single calls, recorded, and run again over what differently stored tensors give back."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from mesa_tune.codecs import Spec
from mesa_tune.engine.observer import Replay
from mesa_tune.engine.registry import registry
from mesa_tune.engine.storage import decided, restore, store
from mesa_tune.policy.settings import MIN_ELEMENTS

Difference = dict[nn.Parameter, Tensor]


@dataclass
class Draw:
    """One option of one layer under one rounding seed."""

    tensor_error: float = 0.0
    local: float = 0.0
    sent: float = 0.0
    below: float | None = None
    total: float | None = None
    joint: float | None = None
    encode_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True)
class Copy:
    """A tensor as decoded, the squares of its change and of itself, and what that took."""

    tensor: Tensor
    change: float
    size: float
    encode_ms: float
    decode_ms: float


Cache = dict[Any, Copy]


class RecordedCall:
    """One call's backward, exact, and its differences under other ways of storing."""

    def __init__(self, replay: Replay, coded: list[bool] | None = None) -> None:
        self.replay = replay
        self.lossy = list(replay.lossy)
        raw = zip(replay.exact_inputs, replay.lossy, strict=True)
        self.coded = coded or [not flag and tensor.numel() > MIN_ELEMENTS for flag, tensor in raw]
        alone = any(self.coded) and self.coded[0] and not any(self.coded[1:])
        skip = replay.formula.independent if alone else ()
        self.needs = tuple(need and place not in skip for place, need in enumerate(replay.needs))
        edges = iter(replay.node.next_functions)  # the last belongs to the noise key
        self.edges = [next(edges) if present else None for present in replay.present]
        self.exact: tuple[Tensor | None, ...] | None = None

    def differences(
        self,
        spec: Spec,
        key: Tensor,
        cache: Cache,
        draw: Draw,
        final: Difference,
        sent: list[tuple[GradientEdge, Tensor]],
    ) -> None:
        """Adds to `final` the changes of parameter gradients, to `sent` those of input gradients."""
        if not any(self.coded):
            return
        self._store(spec, key, cache, draw)
        with torch.no_grad():
            if self.exact is None:
                self.exact = self.replay.run(self.replay.lossy, self.needs)
            changed = self.replay.run(self.lossy, self.needs)
            for edge, new, old in zip(self.edges, changed, self.exact, strict=True):
                if edge is not None and edge[0] is not None and new is not None and old is not None:
                    _sort(edge, new - old, final, sent)

    def _store(self, spec: Spec, key: Tensor, cache: Cache, draw: Draw) -> None:
        """Puts the kept tensors as decoded from `spec` into `lossy`; small and raw ones stay as they are."""
        places = [place for place, coded in enumerate(self.coded) if coded]
        found = [self._one(place, spec, key, cache, draw) for place in places]
        changes, sizes = sum(change for change, _ in found), sum(size for _, size in found)
        draw.tensor_error = max(draw.tensor_error, changes / sizes if sizes else 0.0)

    def _one(self, place: int, spec: Spec, key: Tensor, cache: Cache, draw: Draw) -> tuple[float, float]:
        """One of them; the squares of its change and of itself."""
        copy = cached_copy(self.replay.lossy[place], spec.within(self.replay.row), key, cache)
        self.lossy[place] = copy.tensor
        draw.encode_ms, draw.decode_ms = draw.encode_ms + copy.encode_ms, draw.decode_ms + copy.decode_ms
        return copy.change, copy.size


def _sort(edge: Any, delta: Tensor, final: Difference, sent: list[tuple[GradientEdge, Tensor]]) -> None:
    parameter = getattr(edge[0], "variable", None)
    if isinstance(parameter, nn.Parameter):
        add(final, {parameter: delta.to(parameter.dtype)})
    elif delta.any():
        sent.append((GradientEdge(edge[0], edge[1]), delta))


def stored(tensor: Tensor, spec: Spec, key: Tensor) -> tuple[Tensor, float, float]:
    """`tensor` after being stored by `spec`; milliseconds of encoding and of decoding."""
    registry().clear()
    start = _now(tensor)
    packing = decided(tensor, spec)
    parts = store(tensor, packing, spec, key.to(tensor.device))
    middle = _now(tensor)
    copy = restore(parts, packing, spec)
    return copy, 1e3 * (middle - start), 1e3 * (_now(tensor) - middle)


def cached_copy(tensor: Tensor, spec: Spec, key: Tensor, cache: Cache) -> Copy:
    """The stored copy; free of charge for a tensor met before (Rule 3)."""
    place = (tensor.data_ptr(), tensor.shape, tensor.stride(), spec.group_size)
    if place in cache:
        return replace(cache[place], encode_ms=0.0, decode_ms=0.0)
    copy, encode_ms, decode_ms = stored(tensor, spec, key)
    cache[place] = Copy(copy, norm(copy - tensor), norm(tensor), encode_ms, decode_ms)
    return cache[place]


def add(total: Difference, more: Difference) -> None:
    for parameter, delta in more.items():
        total[parameter] = total[parameter] + delta if parameter in total else delta


def square(difference: Difference) -> float:
    return sum(norm(delta) for delta in difference.values())


def norm(tensor: Tensor) -> float:
    return tensor.float().square().sum(dtype=torch.float64).item()


def _now(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
