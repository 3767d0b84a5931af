"""mesa-tune: the least gradient error that fits your memory budget, layer by layer."""

from mesa_tune.conversion import compress_saved, convert, revert
from mesa_tune.errors import BudgetError, MesaTuneError, PolicyError, RunError, WorkloadError
from mesa_tune.settings import LayerSettings

__all__ = [
    "BudgetError",
    "LayerSettings",
    "MesaTuneError",
    "PolicyError",
    "RunError",
    "WorkloadError",
    "compress_saved",
    "convert",
    "revert",
]
__version__ = "0.1.0"
