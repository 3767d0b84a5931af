"""Search for the best policy whose training step fits a memory budget: by time, by error or by memory.

It is a knapsack problem with a few choices per layer. First it is solved exactly, with the measured prices of
single layers. Then an Optuna study varies the solution and measures the joint error of all layers.
"""

from mesa_tune.search.api import search_policy
from mesa_tune.search.plan import Baseline, Measurement, Plan

__all__ = ["Baseline", "Measurement", "Plan", "search_policy"]
