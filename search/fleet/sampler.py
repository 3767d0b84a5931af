"""The sampler of one trial: Optuna's TPE, seeded by the trial's slot, with a history of bounded length."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, PartialFixedSampler, TPESampler

STARTUP = 10
BEST, LATEST = 100, 400
"""Finished trials that TPE looks at: its cost grows with their number, while its advice hardly changes."""


def sampler_of(seed: int, slot: int, history: Sequence[Any], fixed: Mapping[str, Any]) -> BaseSampler:
    """Return the sampler of the trial at `slot`; the parameters in `fixed` are not sampled.

    `history`: finished and running trials.
    """
    mixed = int(np.random.SeedSequence([seed, slot]).generate_state(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        sampler = _Sampler(mixed, _window(history))
        return PartialFixedSampler(dict(fixed), sampler) if fixed else sampler


def _window(history: Sequence[Any]) -> list[Any]:
    if len(history) <= BEST + LATEST:
        return list(history)
    earlier = [trial for trial in history[:-LATEST] if trial.state.is_finished()]
    best = {trial.number for trial in sorted(earlier, key=lambda trial: trial.value)[:BEST]}
    return [trial for trial in earlier if trial.number in best] + list(history[-LATEST:])


class _Sampler(TPESampler):
    """Multivariate TPE that sees only the trials in `history`; parameters may differ from trial to trial."""

    def __init__(self, seed: int, history: Sequence[Any]) -> None:
        super().__init__(seed=seed, n_startup_trials=STARTUP, group=True)
        self.history = history

    def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
        return super().infer_relative_search_space(self._seen(study), trial)

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> Any:
        return super().sample_relative(self._seen(study), trial, search_space)

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return super().sample_independent(self._seen(study), trial, param_name, param_distribution)

    def _seen(self, study: Any) -> Any:
        return _View(study, self.history)


class _View:
    """A study with other trials."""

    def __init__(self, study: Any, trials: Sequence[Any]) -> None:
        self._study = study
        self._seen = trials

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def _get_trials(self, deepcopy: bool, states: Collection[Any] | None = None, **_: Any) -> list[Any]:
        assert not deepcopy
        return [trial for trial in self._seen if states is None or trial.state in states]
