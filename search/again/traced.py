"""The plan's own step, traced under its own policy: the bytes that are promised.

The hard part: the solver adds up bytes of single choices, and a step is not quite such a sum. (A block that
runs again does without transformers' cache of keys, but not without that of the blocks before it: of a small
Llama's plan for 40 %, the sum was 8 % too low.) So the plan is traced on fake tensors. Where it does not fit,
each slot in which the trace has other bytes than the sum gives the difference to the choice of the layer
there, or to that of the module that runs again around it; then the request is solved again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from mesa_tune.profiles.prediction import Prediction
from mesa_tune.profiles.profile import Profile
from mesa_tune.search.problem import NONE, Chosen, Decision, Space

if TYPE_CHECKING:
    from mesa_tune.measure.fake_steps import PolicyStep

ROUNDS = 4
"""Plans that are traced at most. After half of them, the limit is lowered by the excess, too."""
SECONDS = 10.0
"""How long each further solve may take."""
SMALL = 0.002
"""Share of a peak by which the limit is lowered at once."""
_NEAR = 0.9
"""Slots below this share of the peak are left alone."""


class Moment(NamedTuple):
    """A slot of a step by name: the layer whose call it is, and the phase."""

    layer: str | None
    phase: str


def traced_prediction(predicted: Prediction, step: PolicyStep) -> Prediction:
    """Return the prediction with the bytes of the traced step."""
    return replace(
        predicted,
        saved_bytes=step.trace.saved_bytes,
        peak_bytes=step.peak,
        peak=predicted.peak if step.peak == predicted.peak_bytes else step.at_peak,
    )


def corrected(space: Space, chosen: Chosen, step: PolicyStep, profile: Profile) -> Space:
    """Return the space with the bytes of the traced step, where they differ.

    `chosen`: what was traced. `profile`: of the step with slices, if the space is.
    """
    live = space.live(chosen)
    peak = max(int(live.max()), step.peak)
    traced: dict[Moment, int] = {}
    for slot in step.trace.slots:
        moment = Moment(slot.layer, slot.phase)
        traced[moment] = max(traced.get(moment, 0), step.static + slot.high)
    places: dict[Moment, list[int]] = {}
    for index, known in enumerate(profile.timeline.slots):
        places.setdefault(Moment(known.layer, known.phase), []).append(index)
    owners = dict(_owners(space, chosen))
    more: dict[int, dict[int, int]] = {}
    for moment, indices in places.items():
        modelled = max(int(live[index]) for index in indices)
        difference = traced.get(moment, modelled) - modelled
        owner = owners.get(moment.layer or "")
        if difference and owner is not None and max(modelled, modelled + difference) > _NEAR * peak:
            more.setdefault(owner, {}).update(dict.fromkeys(indices, difference))
    return _with_bytes(space, chosen, more)


def _owners(space: Space, chosen: Chosen) -> Iterator[tuple[str, int]]:
    """Yield each layer with the number of the decision that chose how it stores."""
    for number, unit in enumerate(space.units):
        around = [
            len(space.units) + module
            for module in space.around[number]
            if chosen[len(space.units) + module] != NONE
        ]
        for name in unit.layers:
            yield name, around[0] if around else number


def _with_bytes(space: Space, chosen: Chosen, more: Mapping[int, Mapping[int, int]]) -> Space:
    """Return the space with more bytes in slots of choices: of each decision's number, by slot."""
    count = len(space.units)
    units = [_with_live(unit, chosen[n], more.get(n, {})) for n, unit in enumerate(space.units)]
    modules = [
        _with_live(module, chosen[n], more.get(n, {})) for n, module in enumerate(space.modules, count)
    ]
    return replace(space, units=tuple(units), modules=tuple(modules))


def _with_live(decision: Decision, position: int, more: Mapping[int, int]) -> Decision:
    if not more:
        return decision
    choices, live = list(decision.choices), decision.choices[position].live.copy()
    for index, difference in more.items():
        live[index] += difference
    choices[position] = replace(choices[position], live=live)
    return replace(decision, choices=tuple(choices))
