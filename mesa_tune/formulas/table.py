"""The tables of all families: their formulas, and torch functions and modules with where they go.

To add a function: its file with `ROUTES` and `LAYERS`, and the file's name in `FAMILIES`.
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
    variance,
    vector_norm,
    where,
)
from mesa_tune.formulas.attention import attention, multihead
from mesa_tune.formulas.norms import batch_norm, composed, layer_norm

FAMILIES = (
    linear,
    convolution,
    layer_norm,
    batch_norm,
    softmax,
    activation,
    relu,
    matmul,
    einsum,
    arithmetic,
    composed,
    where,
    amax,
    vector_norm,
    variance,
    attention,
    multihead,
    cross_entropy,
    elementwise_loss,
    dropout,
    max_pool,
    avg_pool,
)

FORMULAS = {
    each.name: each for family in FAMILIES for each in vars(family).values() if isinstance(each, Formula)
}
ROUTES: Routes = {function: route for family in FAMILIES for function, route in family.ROUTES.items()}
LAYERS: Layers = {kind: function for family in FAMILIES for kind, function in family.LAYERS.items()}


def own_route(module: nn.Module) -> Route | None:
    """The route of the call that `module` itself is; None for a module that is no layer by itself."""
    kind = next((kind for kind in type(module).__mro__ if kind in LAYERS), None)
    return None if kind is None else ROUTES[LAYERS[kind]]
