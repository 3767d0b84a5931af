"""The tables of all families: their formulas, and torch functions and modules with where they go.

To add a function: its file with `ROUTES` and maybe `LAYERS`, and the file's name in `FAMILIES`.
"""

from torch import nn

from mesa_tune.engine.formula import Formula, Layers, Route, Routes
from mesa_tune.formulas import (
    activation,
    amax,
    arithmetic,
    avg_pool,
    convolution,
    cross_entropy,
    dropout,
    einsum,
    elementwise_loss,
    linear,
    matmul,
    max_pool,
    relu,
    softmax,
    tiled_cross_entropy,
    variance,
    vector_norm,
    where,
)
from mesa_tune.formulas.attention import attention, multihead
from mesa_tune.formulas.norms import batch_norm, composed, layer_norm

_PRODUCTS = (linear, convolution, matmul, einsum, arithmetic)
_NORMS = (layer_norm, batch_norm, composed, vector_norm, variance)
_ELEMENTWISE = (activation, relu, dropout, where)
_REDUCTIONS = (softmax, amax, max_pool, avg_pool, cross_entropy, tiled_cross_entropy, elementwise_loss)
FAMILIES = (*_PRODUCTS, *_NORMS, *_ELEMENTWISE, *_REDUCTIONS, attention, multihead)
"""All families: modules with formulas, `ROUTES`, and `LAYERS` if modules of `torch.nn` are such calls."""


FORMULAS = {
    each.name: each for family in FAMILIES for each in vars(family).values() if isinstance(each, Formula)
}
ROUTES: Routes = {function: route for family in FAMILIES for function, route in family.ROUTES.items()}
LAYERS: Layers = {
    kind: function for family in FAMILIES for kind, function in vars(family).get("LAYERS", {}).items()
}


def own_route(module: nn.Module) -> Route | None:
    """The route of the call that `module` itself is; None for a module that is no layer by itself."""
    kind = next((kind for kind in type(module).__mro__ if kind in LAYERS), None)
    return None if kind is None else ROUTES[LAYERS[kind]]
