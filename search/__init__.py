"""The policy with the least gradient error whose training step fits a memory budget.

Placing bits is a knapsack with a few choices a layer. It is solved exactly first, on measured errors of
single layers; then an Optuna study looks around the solution for what only joint measurement shows.
"""

from mesa_tune.search.api import search_policy
from mesa_tune.search.plan import Baseline, Measurement, Plan

__all__ = ["Baseline", "Measurement", "Plan", "search_policy"]
