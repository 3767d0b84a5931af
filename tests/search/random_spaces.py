"""Random small spaces with everything that a space can have, and all their plans, enumerated by numpy.

The enumeration shares no code with the solver: no method of `Space` but its data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.search.problem import NONE, Choice, Limits, Link, Module, Space, Unit

SLOTS, PARTS = 6, 4


class Plans(NamedTuple):
    """All plans of a space: positions, shape [plans, decisions], and what each plan costs."""

    chosen: NDArray[np.int64]
    peak: NDArray[np.int64]
    saved: NDArray[np.int64]
    time: NDArray[np.float64]
    ms: NDArray[np.float64]
    noise: NDArray[np.float64]
    bias: NDArray[np.float64]
    worst: NDArray[np.float64]
    interacting: NDArray[np.float64]

    def priced(self, price: float, time: float = 1.0) -> NDArray[np.float64]:
        """What each plan costs, if its noise ratio, without the floor, has this price."""
        return time * self.time + price * self.interacting

    def within(self, limits: Limits) -> NDArray[np.bool_]:
        """Which plans are within the limits."""
        inside = np.ones(len(self.chosen), dtype=bool)
        for name in ("peak", "saved", "ms", "noise", "bias", "worst"):
            limit = getattr(limits, name)
            if limit is not None:
                inside &= getattr(self, name) <= limit * (1 + 1e-9)
        return inside


def random_space(chance: np.random.Generator, units: int, options: int) -> Space:
    """A space of up to `units` units with up to `options` choices each."""
    count = int(chance.integers(2, units + 1))
    made = [_unit(chance, number, int(chance.integers(1, options + 1))) for number in range(count)]
    clusters: tuple[tuple[int, ...], ...] = ()
    if chance.random() < 0.4:
        clusters = (tuple(sorted(chance.choice(count, size=2, replace=False).tolist())),)
        for number in clusters[0]:
            derived = tuple(_choice(chance, 16, "derive", derived=True) for _ in range(2))
            choices = (*made[number].choices[:3], *derived)
            made[number] = Unit(made[number].layers, "fc", choices, made[number].shares)
    links = tuple(_link(chance, count) for _ in range(int(chance.integers(0, 4))))
    space = Space(
        tuple(made),
        links,
        chance.integers(0, 50, SLOTS),
        int(chance.integers(0, 20)),
        10.0,
        8,
        clusters,
        tuple(_modules(chance, count, len(links))),
        float(chance.choice([0.0, 1e-4])),
    )
    return space.from_fastest()


def _unit(chance: np.random.Generator, number: int, size: int) -> Unit:
    levels = [2, 4, 16, 16, 256]  # two choices of equal level: one of them runs in slices, say
    choices = [_choice(chance, level, "quantize") for level in levels[: size - 1]]
    if size == 1 or chance.random() < 0.9:
        choices.append(_exact(chance))
    return Unit((f"layer.{number}",), "fc", tuple(choices), _shares(chance))


def _shares(chance: np.random.Generator) -> tuple[tuple[int, float], ...]:
    parts = chance.choice(PARTS, size=int(chance.integers(0, 3)), replace=False)
    return tuple((int(part), float(10 ** chance.uniform(-1, 1))) for part in parts)


def _exact(chance: np.random.Generator) -> Choice:
    live = _interval(chance, int(chance.integers(50, 100)))
    return Choice(EXACT, 0.0, 0.0, live, int(live.max()))


def _choice(
    chance: np.random.Generator, level: int, store: str, *, derived: bool = False, links: tuple[int, ...] = ()
) -> Choice:
    error = float(10 ** chance.uniform(-5, -1))
    weight = error * {2: 0.8, 4: 0.3}.get(level, 0.0)
    live = _interval(chance, int(chance.integers(0, 50)))
    # What a tile saves: other bytes in the slots of its own work.
    live[chance.integers(0, SLOTS)] += int(chance.integers(0, 20))
    return Choice(
        LayerSettings(level=level, store=store),
        error,
        float(chance.uniform(-0.3, 2.0)),
        live,
        int(live.max()),
        derived,
        root=weight**0.5,
        weight=weight,
        bias=error * float(chance.uniform(0, 0.2)),
        links=links,
    )


def _interval(chance: np.random.Generator, size: int) -> NDArray[np.int64]:
    first, last = sorted(chance.integers(0, SLOTS, 2).tolist())
    live = np.zeros(SLOTS, dtype=np.int64)
    live[first : last + 1] = size
    return live


def _link(chance: np.random.Generator, count: int) -> Link:
    units = tuple(sorted(chance.choice(count, size=2, replace=False).tolist()))
    live = _interval(chance, int(chance.integers(10, 60)))
    return Link(units, live, int(live.max()), exact=bool(chance.random() < 0.7))


def _modules(chance: np.random.Generator, count: int, links: int) -> Iterator[Module]:
    """Blocks of neighbouring units, and a stage around the first of them."""
    if count < 4 or chance.random() < 0.4:
        return
    middle = count // 2
    for name, units in (
        ("block.0", range(middle)),
        ("block.1", range(middle, count)),
        ("stage", range(count)),
    ):
        if chance.random() < 0.7:
            needed = tuple(np.flatnonzero(chance.random(links) < 0.3).tolist())
            choices = tuple(
                _choice(chance, level, "recompute", links=needed)
                for level in (16, 256)[: chance.integers(1, 3)]
            )
            yield Module(name, tuple(units), choices, shares=_shares(chance))


def all_plans(space: Space) -> Plans:
    """Enumerate every consistent plan of the space."""
    chosen = np.concatenate([_with_modules(space, taken) for taken in _takings(space)])
    for cluster in space.clusters:
        derived = np.stack([_of(space, chosen, number, "derived") for number in cluster])
        chosen = chosen[(derived == derived[0]).all(0)]
    total: dict[str, NDArray[np.float64]] = {
        name: sum(_of(space, chosen, number, name) for number in range(chosen.shape[1]))  # type: ignore[misc]
        for name in ("live", "saved", "ms", "noise", "root", "weight", "bias")
    }
    for number, link in enumerate(space.links):
        need = _needed(space, chosen, number)
        total["live"] = total["live"] + need[:, None] * link.live
        total["saved"] = total["saved"] + need * link.saved
    expected = np.maximum(total["noise"] + total["root"] ** 2 - total["weight"], space.floor)
    own = np.zeros((len(chosen), PARTS))
    for number, decision in enumerate(space.decisions):
        for part, share in decision.shares:
            own[:, part] += share * _of(space, chosen, number, "noise")
    return Plans(
        chosen,
        (total["live"] + space.base).max(1).astype(np.int64),
        (total["saved"] + space.base_saved).astype(np.int64),
        total["ms"],
        total["ms"] + space.base_ms,
        np.where(total["noise"] > 0, expected, 0.0),
        total["bias"],
        own.max(1),
        total["noise"] + total["root"] ** 2 - total["weight"],
    )


def consistent(space: Space) -> Iterator[tuple[int, ...]]:
    """Plans of a small space without modules, by the rule of the space itself: no part of the enumeration."""
    every = product(*(range(len(unit.choices)) for unit in space.units))
    return filter(space.is_consistent, every)


def units_inside(space: Space, taken: Sequence[int]) -> list[int]:
    """The units inside the taken modules, each as often as a module around it is taken."""
    pairs = zip(space.modules, taken, strict=True)
    return [unit for module, position in pairs if position != NONE for unit in module.units]


def _takings(space: Space) -> Iterator[tuple[int, ...]]:
    """Positions of the modules, no two of which share a unit."""
    for taken in product(*([NONE, *range(len(module.choices))] for module in space.modules)):
        inside = units_inside(space, taken)
        if len(inside) == len(set(inside)):
            yield taken


def _with_modules(space: Space, taken: tuple[int, ...]) -> NDArray[np.int64]:
    inside = set(units_inside(space, taken))
    ranges = [
        [NONE] if number in inside else range(len(unit.choices)) for number, unit in enumerate(space.units)
    ]
    grids = np.meshgrid(*ranges, *([position] for position in taken), indexing="ij")
    return np.stack([grid.ravel() for grid in grids], axis=1)


def _of(space: Space, chosen: NDArray[np.int64], number: int, name: str) -> NDArray[np.float64]:
    """A value of the choice that each plan makes in a decision; 0 where it makes none."""
    decisions: list[Unit | Module] = [*space.units, *space.modules]
    choices = decisions[number].choices
    values = np.array([getattr(choice, name) or 0 for choice in choices] if name != "live" else
                      [choice.live for choice in choices], dtype=np.float64)  # fmt: skip
    positions = chosen[:, number]
    picked = values[np.maximum(positions, 0)]
    none = positions == NONE
    picked[none] = 0
    return picked


def _needed(space: Space, chosen: NDArray[np.int64], number: int) -> NDArray[np.bool_]:
    link, needed = space.links[number], np.zeros(len(chosen), dtype=bool)
    for unit in link.units:
        exact = np.array([choice.settings.exact for choice in space.units[unit].choices])
        needed |= (chosen[:, unit] != NONE) & (exact[np.maximum(chosen[:, unit], 0)] == link.exact)
    for position, module in enumerate(space.modules, len(space.units)):
        asks = np.array([number in choice.links for choice in module.choices])
        needed |= (chosen[:, position] != NONE) & asks[np.maximum(chosen[:, position], 0)]
    return needed
