"""The tables of all families: formulas by name, torch functions and modules with where they go.

To add a function: its file with `FORMULAS`, `ROUTES` and `LAYERS`, and the file's name in `FAMILIES`.
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
    rebuilding,
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
    rebuilding,
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

FORMULAS: dict[str, Formula] = {name: one for family in FAMILIES for name, one in family.FORMULAS.items()}
ROUTES: Routes = {function: route for family in FAMILIES for function, route in family.ROUTES.items()}
LAYERS: Layers = {kind: function for family in FAMILIES for kind, function in family.LAYERS.items()}


def own_route(module: nn.Module) -> Route | None:
    """The route of the call that `module` itself is; None for a module that is no layer by itself."""
    kind = next((kind for kind in type(module).__mro__ if kind in LAYERS), None)
    return None if kind is None else ROUTES[LAYERS[kind]]
