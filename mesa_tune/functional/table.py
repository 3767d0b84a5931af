"""The tables of all families: their formulas, and torch functions and modules with where they go.

To add a function: its file with `ROUTES` and `LAYERS`, and the file's name in `FAMILIES`.
"""

from torch import nn

from mesa_tune.functional import (
    activation,
    attention,
    batchnorm,
    bits,
    contraction,
    conv,
    elementwise,
    extremes,
    fc,
    loss,
    masks,
    multihead,
    norm,
    pointwise,
    pools,
    products,
    residuals,
    rowwise,
    selecting,
    variance,
    vector_norm,
    window,
)
from mesa_tune.functional.formula import Formula, Layers, Route, Routes

FAMILIES = (
    fc,
    conv,
    norm,
    batchnorm,
    activation,
    pointwise,
    bits,
    products,
    contraction,
    elementwise,
    rowwise,
    selecting,
    extremes,
    vector_norm,
    variance,
    attention,
    multihead,
    loss,
    residuals,
    masks,
    window,
    pools,
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
