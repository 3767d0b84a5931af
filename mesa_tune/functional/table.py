"""The table of formulas. To add one: its file, and its line here (and its torch functions in `routes.py`)."""

from mesa_tune.functional import activation, linear, norm
from mesa_tune.functional.formula import Formula

FORMULAS: dict[str, Formula] = {
    "linear": linear.LINEAR,
    "gelu": activation.GELU,
    "layer_norm": norm.LAYER_NORM,
}
