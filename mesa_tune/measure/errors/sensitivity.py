"""Gradient error of each layer under each option, without a training step for each.

One exact forward and backward records the incoming gradient of each call. Then the backward of one call runs
again with its saved tensors stored under an option. Changes of its parameter gradients are final. Changes of
its input gradients go through the rest of the graph by themselves, because a backward is linear in its
incoming gradient.

What is hard: this last part costs up to a whole backward. So it runs only for an option of 1 bit and for one
of more bits, another on each batch, and after the first batch only for a few of the layers (see
`amplification`). What it makes of a change of input gradients, the *amplification* (a ratio of squared
norms), is about the same for all options of more than 1 bit (measured on small models: they scatter by 2 to
17 %; at 2 bits of a ResNet it is about 20 % off). So each option takes the amplification of all options of
its kind: its own would vary more by chance, and a solver would choose the lucky ones. Where others derive
what a layer stores, its amplification is the same, too.
And the incoming gradients of all calls take about as much memory as what the step saves: see `recording`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mesa_tune.codecs import Spec
from mesa_tune.measure.errors.amplification import Amplified
from mesa_tune.measure.errors.noise import Parts
from mesa_tune.measure.errors.prices import Price, can_follow, filled, joint_ratio, leaders, nearest
from mesa_tune.measure.errors.recorded import (
    TRIES,
    Changes,
    CopyCache,
    Difference,
    Draw,
    RecordedCall,
    add,
    squared_norm,
    stored,
)
from mesa_tune.measure.errors.recording import Recording
from mesa_tune.measure.memory.trace import observing
from mesa_tune.policy.settings import MIN_ELEMENTS, LayerSettings
from mesa_tune.profiles.entries import REFERENCE_GROUP, kind
from mesa_tune.profiles.own_noise import Floats, OwnNoise, Shares, shares_of

REFERENCE_BITS = (4, 2, 3, 6)
"""Bits, by batch in turn, of the option whose changes go through the graph, in groups of `REFERENCE_GROUP`
elements; besides those of 1 bit. Where no option has these bits, the nearest does."""

_SECOND_SEED = 1_000_003


class Sensitivity:
    """The recorded exact step on one batch, and the errors of each layer's options against it.

    `seed`: of their rounding noise, and number of the batch. `splits`: also measure the part of the errors
    that is a bias, with a second rounding seed. `screens`: the errors only choose options. `tries`: how often
    tensors are stored and restored for their times. `amplifications`: those that are known, which are not
    measured. `slice`: the recorded step on a slice of the batch. `at_once`: see `Recording`. The forward must
    run in a session of `RawConversion`, and be observed by `recording`. `own`: beside which errors count.
    `shares`: on which parts the error of each layer falls.
    """

    def __init__(
        self,
        parts: Parts,
        own: OwnNoise,
        seed: int,
        *,
        splits: bool = False,
        screens: bool = False,
        tries: int = TRIES,
        at_once: bool = False,
    ) -> None:
        self.parts, self.own = parts, own
        self.parameters = parts.parameters
        self.seed, self.splits, self.screens, self.tries = seed, splits, screens, tries
        self.sizes: dict[Any, float] = {}
        self.recording = Recording(at_once=at_once)
        self.outputs: Sequence[Tensor] = ()
        self.gradients: Sequence[Tensor] = ()
        self.exact: Difference = {}
        self.norm, self.batches = 0.0, 1
        self.references: frozenset[LayerSettings] = frozenset()
        self.leaders: dict[LayerSettings, LayerSettings] = {}
        self.amplifications: dict[Amplified, Floats] = {}
        self.shares: dict[str, Shares] = {}
        self.slice: Sensitivity | None = None

    def record(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], others: Iterable[Tensor] = ()
    ) -> None:
        """Run the exact backward of `outputs` from `gradients`, and retain its graph.

        `others`: the losses of the other micro-batches of the step. Errors are relative to the sum of all
        gradients. All micro-batches round, each by itself: n of them have n times the recorded one's error.
        """
        self.outputs, self.gradients = outputs, gradients
        self.recording.open = True
        with observing(self.recording):
            exact = self._backward(outputs, gradients)
        self.recording.open = False
        total, self.batches = dict(exact), 1
        if self.recording.hooked:  # only their errors are differences to it; it is as large as the model
            self.exact = exact
        del exact
        for other in others:
            add(total, self._backward([other], [torch.ones_like(other)]))
            self.batches += 1
        self.norm = float(self.parts.squares_of(total).sum())

    def _errors(self, squares: Floats) -> Floats:
        """Return the error of the step, relative to its gradient and beside own noise; `squares`: by part."""
        return self.batches * np.array([squares.sum() / self.norm, self.own.ratio(squares)])

    def prices(
        self, layers: Sequence[str], options: Sequence[LayerSettings]
    ) -> tuple[dict[str, list[Price]], list[float]]:
        """Return the prices of `options` for each of `layers`, which share tensors.

        Also return, for each option, the ratio of the layers' joint error to the sum of their own errors.
        Return no ratios if none was measured, because amplifications are known.
        """
        hooked = {layer: self._hooked(layer, options) for layer in layers if layer in self.recording.hooked}
        routed = [layer for layer in layers if layer not in hooked]
        if not routed:
            return hooked, [1.0] * len(options)
        self._require(routed)
        calls = {
            layer: [RecordedCall(replay) for replay in self.recording.replays.get(layer, [])]
            for layer in routed
        }
        draws = self._draws(calls, options)
        joint = [joint_ratio(list(draws[option].values())) for option in options]
        prices = hooked | {
            layer: self._prices({option: draws[option][layer] for option in draws}, options)
            for layer in routed
        }
        for layer in routed:
            self._note_shares(layer, [draws[option][layer] for option in options if option.bits > 1])
        return prices, filled(joint, options)

    def _note_shares(self, layer: str, draws: Iterable[Draw]) -> None:
        """Note on which parts the errors of a layer fall, under the first option of which it was measured."""
        squares = next((draw.squares for draw in draws if draw.squares is not None), None)
        if squares is not None:
            self.shares[layer] = shares_of(self.own, squares)

    def amplify(self, layers: Sequence[str], options: Sequence[LayerSettings]) -> list[float]:
        """Measure the amplifications of `layers` on the slice, if there is one.

        They are those of the whole batch: where its gradient is a mean, all changes are larger alike. Return
        the ratios of joint errors, as `prices`.
        """
        if self.slice is None or not set(layers) <= self.slice.recording.replays.keys():
            return []
        references = [option for option in self._references(options) if not option.omits]
        _, joint = self.slice.prices(layers, references)
        scale = self.batches * np.array([self.slice.norm / self.norm, 1.0])
        measured = self.slice.amplifications.items()
        self.amplifications |= {key: scale * value for key, value in measured if key[0] in layers}
        self.shares |= self.slice.shares
        ratios = dict(zip(references, joint, strict=False))
        return filled([ratios.get(option) for option in options], options)

    def together(self, calls: Sequence[RecordedCall], options: Sequence[LayerSettings]) -> list[Price]:
        """Return the price of each option for all `calls`, as if they were of one layer.

        If the input gradients of only one layer change, its amplification is taken where it is known.
        """
        self._require([call.replay.layer for call in calls])
        draws = self._draws({"": calls}, options)
        return self._prices({option: draws[option][""] for option in options}, options)

    def _require(self, layers: Iterable[str]) -> None:
        """Record the incoming gradients of the calls of `layers`, unless they are recorded."""
        recorded = dict.fromkeys(layer for layer in layers if layer in self.recording.replays)
        if recorded.keys() <= self.recording.wanted:
            return
        self.recording.want(recorded)
        with observing(self.recording):
            self._backward(self.outputs, self.gradients)

    def _draws(
        self, calls: Mapping[str, Sequence[RecordedCall]], options: Sequence[LayerSettings]
    ) -> dict[LayerSettings, dict[str, Draw]]:
        """Return the draws of each layer under `options`: those of options that follow are only stored."""
        self.references = self._references(options)
        self.leaders = leaders(options, self._bits)
        draws = {option: self._draw(calls, option) for option in dict.fromkeys(self.leaders.values())}
        for option in options:
            if option in draws:
                continue
            draws[option] = self._stored(calls, option)
            of_leader = draws[self.leaders[option]]
            if not all(can_follow(draw, of_leader[layer]) for layer, draw in draws[option].items()):
                self.leaders[option] = option
                draws[option] = self._draw(calls, option)
        return draws

    def _stored(self, calls: Mapping[str, Sequence[RecordedCall]], option: LayerSettings) -> dict[str, Draw]:
        """Return the draws of an option of which only tensor errors and times are measured."""
        spec, seed = _spec(option), torch.tensor([self.seed], dtype=torch.int64)
        cache = CopyCache(self.tries, self.sizes)
        draws = {layer: Draw() for layer in calls}
        for layer, layer_calls in calls.items():
            for call in layer_calls:
                call.store(spec, seed, cache, draws[layer])
        return draws

    def _draw(self, calls: Mapping[str, Sequence[RecordedCall]], option: LayerSettings) -> dict[str, Draw]:
        changes = self._changes(calls, option, self.seed, self.tries)
        draws = {layer: change.draw for layer, change in changes.items()}
        if self.splits:
            # Its expectation is the squared norm of the mean change: ‖mean‖² − variance / n, for 2 seeds.
            for layer, second in self._changes(calls, option, self.seed + _SECOND_SEED).items():
                final = self.parts.products(changes[layer].final, second.final)
                draws[layer].bias = self._errors(final), changes[layer].sent_products(second)
        for change in changes.values():
            is_known = self._known(change.draw, option) is not None
            self._measure(change, option in self.references and not is_known)
        if len(draws) > 1 and all(draw.total is not None for draw in draws.values()):
            together: Difference = {}
            for change in changes.values():
                add(together, change.final)
            joint = self._errors(self.parts.squares_of(together))
            for draw in draws.values():
                draw.joint = joint
        return draws

    def _changes(
        self, calls: Mapping[str, Sequence[RecordedCall]], option: LayerSettings, seed: int, tries: int = 1
    ) -> dict[str, Changes]:
        """Return the changes of gradients that an option of the layers makes with one rounding seed."""
        spec, seed_tensor = _spec(option), torch.tensor([seed], dtype=torch.int64)
        cache = CopyCache(tries, self.sizes)
        changes = {layer: Changes() for layer in calls}
        for layer, layer_calls in calls.items():
            for call in layer_calls:
                call.differences(spec, seed_tensor, cache, changes[layer])
        return changes

    def _measure(self, change: Changes, is_reference: bool) -> None:
        """Set the errors of the draw; for a reference, what is sent goes through the graph."""
        draw = change.draw
        squares = self.parts.squares_of(change.final)
        draw.local = self._errors(squares)
        draw.sent = squared_norm(*(delta for _, delta in change.sent))
        if not change.sent:
            draw.total, draw.squares = draw.local, squares
        elif is_reference:
            below = self._backward([edge for edge, _ in change.sent], [delta for _, delta in change.sent])
            add(change.final, below)
            draw.squares = self.parts.squares_of(change.final)
            draw.total = self._errors(draw.squares)

    def _prices(self, draws: Mapping[LayerSettings, Draw], options: Sequence[LayerSettings]) -> list[Price]:
        """Return the prices of options: of the leaders, and of those that follow them."""
        measured = {leader: self._measured(draws, leader) for leader in dict.fromkeys(self.leaders.values())}
        return [
            measured[option] if option in measured else measured[leader].followed_by(draws[option])
            for option in options
            for leader in [self.leaders[option]]
        ]

    def _measured(self, draws: Mapping[LayerSettings, Draw], option: LayerSettings) -> Price:
        """Return the price of an option whose changes were measured, with the amplification of its kind."""
        draw = draws[option]
        known = self._known(draw, option)
        amplification = self._amplification(draws, option) if known is None else known
        if draw.sender is not None and not option.omits:
            self.amplifications[draw.sender, self._pool(option)] = amplification
        price = self._price(draw, draw.local + draw.sent * amplification, draw.total is not None)
        if draw.bias is None:
            return price
        bias = draw.bias[0] + draw.bias[1] * amplification
        return replace(price, bias=min(max(0.0, float(bias[1])), price.ratio))

    def _references(self, options: Sequence[LayerSettings]) -> frozenset[LayerSettings]:
        """Return the options whose changes of input gradients go through the graph.

        These are all that leave out elements, because no other option's error is similar. Of each other kind,
        that of 1 bit and the one nearest to `REFERENCE_BITS`. A batch that screens has only the latter: it
        makes no price.
        """
        found = nearest(options, self._bits, self._pool)
        return frozenset([*found.values(), *(option for option in options if option.omits)])

    @property
    def _bits(self) -> int:
        """Bits of the options that are measured on this batch."""
        return REFERENCE_BITS[self.seed % len(REFERENCE_BITS)]

    def _pool(self, option: LayerSettings) -> Any:
        """Return what options must have in common for the amplification of one to be that of the others."""
        return kind(option), option.bits == 1 and not self.screens

    def _amplification(self, draws: Mapping[LayerSettings, Draw], option: LayerSettings) -> Floats:
        """Return the mean amplification of the references of an option's kind.

        An option that leaves out elements has its own.
        """
        measured = [
            (draw.total - draw.local) / draw.sent
            for settings, draw in draws.items()
            if self._pool(settings) == self._pool(option)
            and (settings == option or not option.omits)
            and draw.total is not None
            and draw.sent
        ]
        return np.mean(measured, axis=0) if measured else np.zeros(2)

    def _known(self, draw: Draw, option: LayerSettings) -> Floats | None:
        """Return the amplification of the only layer whose input gradients change; None if unknown."""
        if draw.sender is None or option.omits:
            return None
        return self.amplifications.get((draw.sender, self._pool(option)))

    def _price(self, draw: Draw, errors: Floats, measured: bool) -> Price:
        error, ratio = np.maximum(0.0, errors).tolist()
        return Price(draw.tensor_error, error, ratio, measured, draw.encode_ms, draw.decode_ms)

    def _hooked(self, layer: str, options: Sequence[LayerSettings]) -> list[Price]:
        """Return the prices for a layer stored by hooks.

        One whole backward measures the reference option; the others are scaled by tensor error.
        """
        tensors = self.recording.hooked[layer]
        effective = [option.hooked for option in options]
        draws = {option: self._stored_alone(tensors, option) for option in set(effective)}
        reference = next(
            (option for option in effective if option.group_size == REFERENCE_GROUP), effective[0]
        )
        price = self._price(draws[reference], self._hooked_error(layer, reference), True)
        return [price if option == reference else price.followed_by(draws[option]) for option in effective]

    def _stored_alone(self, tensors: list[Tensor], option: LayerSettings) -> Draw:
        draw, change, size = Draw(), 0.0, 0.0
        for tensor in tensors:
            if tensor.numel() > MIN_ELEMENTS:
                copy, encode, decode = stored(tensor, _spec(option), torch.tensor([self.seed]), self.tries)
                change, size = change + squared_norm(copy - tensor), size + squared_norm(tensor)
                draw.encode_ms, draw.decode_ms = draw.encode_ms + encode, draw.decode_ms + decode
        draw.tensor_error = change / size if size else 0.0
        return draw

    def _hooked_error(self, layer: str, option: LayerSettings) -> Floats:
        self.recording.changed = (layer, _spec(option), torch.tensor([self.seed]))
        with observing(self.recording):
            gradient = self._backward(self.outputs, self.gradients)
        self.recording.changed = None
        for parameter, exact in self.exact.items():
            gradient[parameter] = gradient[parameter] - exact
        squares = self.parts.squares_of(gradient)
        self.shares[layer] = shares_of(self.own, squares)
        return self._errors(squares)

    def _backward(self, outputs: Sequence[Any], gradients: Sequence[Tensor]) -> Difference:
        for parameter in self.parameters:
            parameter.grad = None
        torch.autograd.backward(outputs, gradients, retain_graph=True)
        result = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
        for parameter in self.parameters:
            parameter.grad = None
        return result


def _spec(option: LayerSettings) -> Spec:
    spec = Spec.of(option, MIN_ELEMENTS)
    assert spec is not None
    return spec
