"""One figure per frame: DataFrame in, matplotlib Figure out. The title of a figure says its finding.

What is hard: figures must stay readable for 5 layers and for 500, and titles true for every result.
"""

from mesa_tune.reports.figures.comparison import predicted_beside_measured
from mesa_tune.reports.figures.memory import memory_by_layer, memory_by_tag, memory_through_step
from mesa_tune.reports.figures.modules import memory_by_module
from mesa_tune.reports.figures.pareto import pareto_front
from mesa_tune.reports.figures.storage import storage_along_depth
from mesa_tune.reports.figures.study import study_progress

__all__ = [
    "memory_by_layer",
    "memory_by_module",
    "memory_by_tag",
    "memory_through_step",
    "pareto_front",
    "predicted_beside_measured",
    "storage_along_depth",
    "study_progress",
]
