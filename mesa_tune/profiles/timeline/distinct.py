"""The distinct settings of an assignment: costs are computed for each of them, not for each layer.

What is hard is speed: a search predicts thousands of policies for hundreds of layers, and they repeat few
settings. So costs are columns, one entry per layer or tensor, computed once for each settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from mesa_tune.policy.settings import EXACT, LayerSettings

Assignment = Mapping[str, LayerSettings]
"""Layer name -> settings; a layer that is not in it is stored exactly."""


@dataclass(frozen=True)
class DistinctSettings:
    """Distinct settings, the first EXACT, and the position of each layer's among them; shape [layers]."""

    values: list[LayerSettings]
    positions: NDArray[np.int64]

    @staticmethod
    def of(assignment: Assignment, names: Sequence[str]) -> DistinctSettings:
        """Return the settings of the layers `names`."""
        chosen = list(map(assignment.get, names, repeat(EXACT)))
        # By identity first: the hash of settings takes longer than everything else here.
        keys = list(map(id, chosen))
        known = {EXACT: 0}
        objects = dict(zip(keys, chosen, strict=True)).items()
        positions = {key: known.setdefault(settings, len(known)) for key, settings in objects}
        return DistinctSettings(list(known), np.fromiter(map(positions.__getitem__, keys), dtype=np.int64))

    def flags(self, flag: Callable[[LayerSettings], bool]) -> NDArray[np.bool_]:
        """Return the flag of each layer's settings; shape [layers]."""
        return np.array([flag(settings) for settings in self.values], dtype=np.bool_)[self.positions]


class Incidence:
    """Which layers each row has: rows are saved tensors, or ties."""

    def __init__(self, rows: Sequence[Sequence[str]], names: Sequence[str]) -> None:
        position = {name: number for number, name in enumerate(names)}
        self.count = len(rows)
        self.rows = np.repeat(np.arange(self.count), [len(row) for row in rows])
        self.layers = np.array([position[name] for row in rows for name in row], dtype=np.int64)

    def any(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return for each row whether the flag of one of its layers is set; `flags`: one per layer."""
        return self.any_pair(flags[self.layers])

    def any_pair(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return for each row whether one of its flags is set; `flags`: one per pair of row and layer."""
        return np.bincount(self.rows, weights=flags, minlength=self.count) > 0
