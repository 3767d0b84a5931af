"""What kinds of layers add to whole steps, fitted to measured ones.

A step's time, or its gradient's error, is not the sum of those of its layers alone, and the difference is
another factor for each kind of layer. Trials measure whole steps only. So the factors are the weights of a
Bayesian linear regression: what a plan adds by kind, predicted, against what was measured. A draw from the
posterior explores where little is known, and says what is known otherwise (Thompson sampling).
"""

from __future__ import annotations

import numpy as np

from mesa_tune.search.problem import Floats


def drawn_factors(
    added: Floats, measured: Floats, errors: Floats, spreads: Floats, generator: np.random.Generator
) -> Floats:
    """Return a factor for each column of `added`, drawn from the posterior.

    `added`: what each kind adds to each step, predicted; shape [steps, kinds]. `measured`: what each step
    had, [steps], with the standard `errors`. `spreads`: standard deviations of the factors before anything
    was measured, [kinds]; their mean is 1.
    """
    weights = 1 / errors**2
    covariance = np.linalg.inv(np.diag(spreads**-2.0) + added.T @ (weights[:, None] * added))
    mean = 1 + covariance @ added.T @ (weights * (measured - added.sum(axis=1)))
    drawn: Floats = generator.multivariate_normal(mean, covariance, method="cholesky")
    return drawn
