"""What storing a layer's tensors in fewer bits does to the gradient, layer by layer, without a step for each.

One exact forward and backward of our own functions, with everything kept as it is, records each call's
incoming gradient. Then a call's backward alone is run again with its tensors stored in some way. What
changes in parameter gradients is final. What changes in input gradients is sent down the rest of the graph
by itself, since a backward is linear in the gradient that enters it; that costs a part of a backward, and
is done at `REFERENCES` only. Other options follow from those by the ratio of the squared differences sent
down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from mesa_tune.codecs import Spec
from mesa_tune.engine.observer import Replay
from mesa_tune.engine.rematerialize import Recipe
from mesa_tune.engine.storage import Packing
from mesa_tune.policy.settings import MIN_ELEMENTS, LayerSettings
from mesa_tune.profiler.entries import REFERENCE_GROUP
from mesa_tune.profiler.recorded import Cache, Difference, Draw, RecordedCall, add, norm, square, stored
from mesa_tune.profiler.trace import observing

REFERENCES = (1, 2, 4)
"""Bits at which differences of input gradients are really sent down, in groups of `REFERENCE_GROUP`; where
these are not among the options, at the nearest that are."""


@dataclass
class Price:
    """An option's cost: relative squared errors, mean over seeds and its standard error; milliseconds."""

    tensor_error: float
    gradient_error: float
    standard_error: float | None
    measured: bool
    encode_ms: float
    decode_ms: float


@dataclass
class _Recording:
    """Observer of the exact run: the replays of every layer, and which layers hooks store."""

    replays: dict[str, list[Replay]] = field(default_factory=dict)
    hooked: dict[str, list[Tensor]] = field(default_factory=dict)
    open: bool = True
    changed: tuple[str, Spec, Tensor] | None = None
    wants_tensors: ClassVar[bool] = True

    def begin(self, layer: str | None, given: Any) -> None: ...

    def end(self, layer: str | None, output: Any) -> None: ...

    def asked(self, layer: str, tensors: Sequence[Tensor | None]) -> None: ...

    def saved(self, layer: str, tensor: Tensor) -> None: ...

    def stored(
        self,
        layer: str,
        lossy: tuple[Any, ...],
        how: tuple[Packing | Recipe, ...],
        parts: tuple[list[Tensor], ...],
        exact: list[Tensor],
        row: int,
    ) -> None: ...

    def backward(self, replay: Replay) -> None:
        if self.open:
            self.replays.setdefault(replay.layer, []).append(replay)

    def unpacked(self, layer: str, tensor: Tensor) -> Tensor:
        if self.open:
            self.hooked.setdefault(layer, []).append(tensor)
        if self.changed is None or self.changed[0] != layer or tensor.numel() <= MIN_ELEMENTS:
            return tensor
        return stored(tensor, self.changed[1], self.changed[2])[0]


class Sensitivity:
    """The exact step, recorded, and the errors of any layer's options against it.

    `loss` must come from a session of `RawConversion`; `observer` must watch its forward, too.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], seeds: int) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.seeds = seeds
        self.recording = _Recording()
        self.loss: Tensor | None = None
        self.exact: Difference = {}
        self.norm = 0.0
        self.references: frozenset[LayerSettings] = frozenset()

    def record(self, loss: Tensor) -> None:
        """Runs the exact backward of `loss`, keeping its graph."""
        self.loss = loss
        with observing(self.recording):
            self.exact = self._backward([loss], [torch.ones_like(loss)])
        self.recording.open = False
        self.norm = square(self.exact)

    def prices(
        self, layers: Sequence[str], options: Sequence[LayerSettings]
    ) -> tuple[dict[str, list[Price]], list[float]]:
        """For layers that share tensors: each one's price under each option, and by how much their errors do
        more, or less, than add up."""
        hooked = {layer: self._hooked(layer, options) for layer in layers if layer in self.recording.hooked}
        routed = [layer for layer in layers if layer not in hooked]
        if not routed:
            return hooked, [1.0] * len(options)
        calls = {
            layer: [RecordedCall(replay) for replay in self.recording.replays.get(layer, [])]
            for layer in routed
        }
        self.references = _references(options)
        draws: dict[str, dict[LayerSettings, list[Draw]]] = {layer: {} for layer in routed}
        for option in options:
            for seed in range(self.seeds):
                for layer, draw in self._draw(calls, option, seed).items():
                    draws[layer].setdefault(option, []).append(draw)
        joint = [self._joint([draws[layer][option] for layer in routed]) for option in options]
        _borrow_ratios(joint, options)
        prices = hooked | {
            layer: [self._price(draws[layer], option) for option in options] for layer in routed
        }
        return prices, [1.0 if ratio is None else ratio for ratio in joint]

    def together(self, calls: Sequence[RecordedCall], options: Sequence[LayerSettings]) -> list[Price]:
        """The price of each option for all that `calls` take, as if they were one layer's."""
        self.references = _references(options)
        draws: dict[LayerSettings, list[Draw]] = {}
        for option in options:
            draws[option] = [self._draw({"": calls}, option, seed)[""] for seed in range(self.seeds)]
        return [self._price(draws, option) for option in options]

    def _draw(
        self, calls: Mapping[str, Sequence[RecordedCall]], option: LayerSettings, seed: int
    ) -> dict[str, Draw]:
        spec, key = _spec(option), torch.tensor([seed], dtype=torch.int64)
        cache: Cache = {}
        draws: dict[str, Draw] = {}
        totals: list[Difference] = []
        for layer, replays in calls.items():
            draw = draws[layer] = Draw()
            final: Difference = {}
            sent: list[tuple[GradientEdge, Tensor]] = []
            for call in replays:
                call.differences(spec, key, cache, draw, final, sent)
            draw.local = square(final)
            draw.sent = sum(norm(delta) for _, delta in sent)
            if not sent:
                draw.total = draw.local
            elif option in self.references:
                below = self._backward([edge for edge, _ in sent], [delta for _, delta in sent])
                draw.below = square(below)
                add(final, below)
                draw.total = square(final)
            totals.append(final)
        self._relate(draws, totals)
        return draws

    def _relate(self, draws: dict[str, Draw], totals: list[Difference]) -> None:
        if len(totals) < 2 or any(draw.total is None for draw in draws.values()):
            return
        together: Difference = {}
        for total in totals:
            add(together, total)
        joint = square(together)
        for draw in draws.values():
            draw.joint = joint

    def _joint(self, draws: list[list[Draw]]) -> float | None:
        """The layers' joint error over the sum of their own; None where not measured."""
        joint = [draw.joint for draw in draws[0]]
        own = [draw.total for layer in draws for draw in layer]
        if any(value is None for value in joint) or any(value is None for value in own):
            return None if len(draws) > 1 else 1.0
        total = sum(value for value in own if value is not None)
        return sum(value for value in joint if value is not None) / total if total else 1.0

    def _price(self, draws: dict[LayerSettings, list[Draw]], option: LayerSettings) -> Price:
        here = draws[option]
        errors, measured = [], True
        for seed, draw in enumerate(here):
            if draw.total is not None:
                errors.append(draw.total / self.norm)
                continue
            measured = False
            reference = _reference(draws, option, seed)
            below = (reference.below or 0.0) * draw.sent / reference.sent if reference.sent else 0.0
            errors.append((draw.local + below) / self.norm)
        return _summary(here, errors, measured)

    def _hooked(self, layer: str, options: Sequence[LayerSettings]) -> list[Price]:
        """A layer stored by hooks: a whole backward a seed at the reference group, else by tensor error."""
        tensors = self.recording.hooked[layer]
        effective = [option.hooked for option in options]
        draws = {
            option: [self._stored_alone(tensors, option, seed) for seed in range(self.seeds)]
            for option in set(effective)
        }
        reference = next((o for o in effective if o.group_size == REFERENCE_GROUP), effective[0])
        for seed, draw in enumerate(draws[reference]):
            draw.total = self._changed(layer, reference, seed)
        prices = []
        for option in effective:
            errors = []
            for draw, known in zip(draws[option], draws[reference], strict=True):
                ratio = draw.tensor_error / known.tensor_error if known.tensor_error else 1.0
                errors.append((known.total or 0.0) * ratio / self.norm)
            prices.append(_summary(draws[option], errors, option == reference))
        return prices

    def _stored_alone(self, tensors: list[Tensor], option: LayerSettings, seed: int) -> Draw:
        draw, change, size = Draw(), 0.0, 0.0
        for tensor in tensors:
            if tensor.numel() > MIN_ELEMENTS:
                copy, encode, decode = stored(tensor, _spec(option), torch.tensor([seed]))
                change, size = change + norm(copy - tensor), size + norm(tensor)
                draw.encode_ms, draw.decode_ms = draw.encode_ms + encode, draw.decode_ms + decode
        draw.tensor_error = change / size if size else 0.0
        return draw

    def _changed(self, layer: str, option: LayerSettings, seed: int) -> float:
        assert self.loss is not None
        self.recording.changed = (layer, _spec(option), torch.tensor([seed]))
        with observing(self.recording):
            gradient = self._backward([self.loss], [torch.ones_like(self.loss)])
        self.recording.changed = None
        for parameter, exact in self.exact.items():
            gradient[parameter] = gradient[parameter] - exact
        return square(gradient)

    def _backward(self, outputs: Sequence[Any], gradients: Sequence[Tensor]) -> Difference:
        for parameter in self.parameters:
            parameter.grad = None
        torch.autograd.backward(outputs, gradients, retain_graph=True)
        found = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
        for parameter in self.parameters:
            parameter.grad = None
        return found


def _references(options: Sequence[LayerSettings]) -> frozenset[LayerSettings]:
    """The options whose own differences are sent down: what is dropped is like no other option's error.

    Of the others, those of the group size and the bits that are nearest to the wanted ones.
    """
    dropped = {option for option in options if option.drop}
    rest = [option for option in options if not option.drop]
    group = min((_group(option) for option in rest), key=_from_reference, default=0)
    same = [option for option in rest if _group(option) == group]
    bits = {
        min((one.bits for one in same), key=lambda one: abs(one - wanted), default=0) for wanted in REFERENCES
    }
    return frozenset(dropped | {option for option in same if option.bits in bits})


def _group(option: LayerSettings) -> int:
    # Along channels a group spans the batch: larger than any group of consecutive elements.
    return option.group_size or 1 << 20


def _from_reference(group: int) -> float:
    return abs(math.log2(group / REFERENCE_GROUP))


def _reference(draws: dict[LayerSettings, list[Draw]], option: LayerSettings, seed: int) -> Draw:
    """The reference draw whose bits are nearest to those of `option`."""
    known = [
        (settings.bits, here[seed])
        for settings, here in draws.items()
        if here[seed].below is not None and not settings.drop
    ]
    return min(known, key=lambda pair: abs(pair[0] - option.bits), default=(0, Draw()))[1]


def _borrow_ratios(joint: list[float | None], options: Sequence[LayerSettings]) -> None:
    known = [(option.bits, ratio) for option, ratio in zip(options, joint, strict=True) if ratio is not None]
    for place, option in enumerate(options):
        if joint[place] is None and known:
            joint[place] = min(known, key=lambda pair: abs(pair[0] - option.bits))[1]


def _summary(draws: list[Draw], errors: list[float], measured: bool) -> Price:
    values = torch.tensor(errors, dtype=torch.float64)
    deviation = values.std().item() if len(errors) > 1 else None
    return Price(
        sum(draw.tensor_error for draw in draws) / len(draws),
        values.mean().item(),
        None if deviation is None else deviation / len(errors) ** 0.5,
        measured,
        min(draw.encode_ms for draw in draws),
        min(draw.decode_ms for draw in draws),
    )


def _spec(option: LayerSettings) -> Spec:
    spec = Spec.of(option, MIN_ELEMENTS)
    assert spec is not None
    return spec
