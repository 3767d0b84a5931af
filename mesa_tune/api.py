"""The public names of `mesa_tune`."""

from mesa_tune.autotune import auto
from mesa_tune.conversion import compress_saved, convert, revert
from mesa_tune.conversion.resume import load_state_dict, state_dict
from mesa_tune.errors import BudgetError, MesaTuneError, PolicyError, RunError, WorkloadError
from mesa_tune.estimation import Estimate, estimate
from mesa_tune.estimation.oom import explain_oom
from mesa_tune.measure.profiling import profile
from mesa_tune.measure.verification import verify
from mesa_tune.monitor import Monitor, Reading
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.profile import Prediction, Profile
from mesa_tune.profiles.verification import Verification
from mesa_tune.retune import Retune
from mesa_tune.search import Plan, search_policy
from mesa_tune.workload.workload import Workload

__all__ = [
    "BudgetError",
    "Estimate",
    "LayerSettings",
    "MesaTuneError",
    "Monitor",
    "Plan",
    "Policy",
    "PolicyError",
    "Prediction",
    "Profile",
    "Reading",
    "Retune",
    "RunError",
    "Verification",
    "Workload",
    "WorkloadError",
    "auto",
    "compress_saved",
    "convert",
    "estimate",
    "explain_oom",
    "load_state_dict",
    "profile",
    "revert",
    "search_policy",
    "state_dict",
    "verify",
]
