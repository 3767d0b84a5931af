"""Times of kinds of layers, fitted to measured steps.

A step takes longer than the sum of its layers alone, by another factor for each kind of layer. Trials measure
whole steps only. So the factors are the weights of a Bayesian linear regression: what a plan adds by kind,
predicted, against what its step took. A draw from the posterior explores where little is known, and says what
is known otherwise (Thompson sampling).
"""

from __future__ import annotations

import numpy as np

from mesa_tune.search.problem import Floats

SPREAD = 0.5
"""Standard deviation of a factor before anything was measured; its mean is 1."""
_BASE_SPREAD = 0.2
_MODEL_ERROR = 0.005
"""Standard deviation of what such a model cannot say of a step, as a fraction of the plain one."""


def drawn_factors(added: Floats, paces: Floats, errors: Floats, generator: np.random.Generator) -> Floats:
    """Return a factor for each kind, drawn from the posterior.

    `added`: what each kind adds to each measured step, predicted, over the plain step's time; shape [steps,
    kinds]. `paces`: the times of these steps over the plain one's. `errors`: their standard errors.
    """
    rows = np.column_stack([np.ones(len(added)), added])
    weights = 1 / (errors**2 + _MODEL_ERROR**2)
    prior = np.diag(np.array([_BASE_SPREAD, *[SPREAD] * added.shape[1]]) ** -2.0)
    expected = np.ones(rows.shape[1])
    covariance = np.linalg.inv(prior + rows.T @ (weights[:, None] * rows))
    mean = expected + covariance @ rows.T @ (weights * (paces - rows @ expected))
    drawn: Floats = generator.multivariate_normal(mean, covariance, method="cholesky")[1:]
    return drawn
