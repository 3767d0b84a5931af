"""The exact run of a step that is recorded: replays of its calls, and their incoming gradients in parts.

What is hard: incoming gradients of all calls take about as much memory as what the step saves. So where
memory is scarce, one part of them is alive at a time, and a further backward records the next part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from mesa_tune.codecs import Spec
from mesa_tune.engine.observer import Observer, Replay
from mesa_tune.measure.errors.recorded import stored
from mesa_tune.policy.settings import MIN_ELEMENTS

PARTS = 4
"""Incoming gradients are recorded in parts of a quarter of their bytes at most, or of one group of layers."""

_FREED = torch.empty(0)


@dataclass
class Recording(Observer):
    """Observer of the exact run: the replays of each layer, and the tensors that hooks store.

    `changed`: the layer whose hooks return copies stored by this spec and seed. `open`: the backward of the
    loss is recorded. A backward that runs inside the loss, as in adversarial training, is not. `at_once`: all
    incoming gradients are alive at a time.
    `sizes`: for each layer, the bytes of its incoming gradients. `wanted`: the layers that have these now.
    """

    replays: dict[str, list[Replay]] = field(default_factory=dict)
    hooked: dict[str, list[Tensor]] = field(default_factory=dict)
    sizes: Counter[str] = field(default_factory=Counter)
    wanted: frozenset[str] = frozenset()
    open: bool = False
    at_once: bool = False
    changed: tuple[str, Spec, Tensor] | None = None
    wants_tensors = True

    def backward(self, replay: Replay) -> None:
        if self.open:
            self.replays.setdefault(replay.layer, []).append(replay)
            self.sizes[replay.layer] += replay.grad.nbytes
            if self.at_once:
                self.wanted |= {replay.layer}
            else:
                replay.grad = _FREED
        elif replay.layer in self.wanted:
            known = next(known for known in self.replays[replay.layer] if known.node is replay.node)
            known.grad = replay.grad

    def want(self, layers: Collection[str]) -> None:
        """Free the incoming gradients, and let the next backward record those of `layers` and of others.

        The others come next in the forward, and do not make the part larger than its share.
        """
        forward = list(reversed(self.replays))
        following = [name for name in forward[forward.index(next(iter(layers))) :] if name not in layers]
        wanted, size = list(layers), sum(self.sizes[layer] for layer in layers)
        for layer in following:
            size += self.sizes[layer]
            if size * PARTS > self.sizes.total():
                break
            wanted.append(layer)
        self.wanted = frozenset(wanted)
        for replay in chain.from_iterable(self.replays.values()):
            replay.grad = _FREED

    def unpacked(self, layer: str, tensor: Tensor) -> Tensor:
        if self.open:
            self.hooked.setdefault(layer, []).append(tensor)
        if self.changed is None or self.changed[0] != layer or tensor.numel() <= MIN_ELEMENTS:
            return tensor
        return stored(tensor, self.changed[1], self.changed[2])[0]
