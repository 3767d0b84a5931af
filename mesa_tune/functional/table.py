"""The table of formulas. To add one: its file, and its line here (and its torch functions in `routes.py`)."""

from mesa_tune.functional import activation, attention, conv, fc, loss, norm, products
from mesa_tune.functional.formula import Formula

FORMULAS: dict[str, Formula] = {
    "linear": fc.LINEAR,
    "conv": conv.CONV,
    "batch_norm": norm.BATCH_NORM,
    "layer_norm": norm.LAYER_NORM,
    "gelu": activation.GELU,
    "relu": activation.RELU,
    "softmax": activation.SOFTMAX,
    "matmul": products.MATMUL,
    "matmul_plus": products.MATMUL_PLUS,
    "attention": attention.ATTENTION,
    "cross_entropy": loss.CROSS_ENTROPY,
}
