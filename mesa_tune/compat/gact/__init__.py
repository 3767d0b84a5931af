"""GACT (arXiv 2206.11357) as its users write it: `import mesa_tune.compat.gact as gact`."""

from mesa_tune.compat.gact import controller, ops, utils
from mesa_tune.compat.gact.conf import QuantizationConfig, config, set_adapt_interval, set_optimization_level

__all__ = [
    "QuantizationConfig",
    "config",
    "controller",
    "ops",
    "set_adapt_interval",
    "set_optimization_level",
    "utils",
]
