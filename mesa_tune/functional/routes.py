"""Which torch function goes to which function of ours, under which tag and name; and which layer a module *is*."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from mesa_tune.functional import activation, linear, norm


class Route(NamedTuple):
    """`name` stands in layer names (`blocks.0.attn.softmax.0`), `tag` in policies, `serve(call, *args)` does it."""

    name: str
    tag: str
    serve: Callable[..., Any]


_LINEAR = Route("linear", "fc", linear.linear)
_GELU = Route("gelu", "gelu", activation.gelu)
_LAYER_NORM = Route("layer_norm", "layernorm", norm.layer_norm)

ROUTES: dict[Callable[..., Any], Route] = {
    F.linear: _LINEAR,
    F.gelu: _GELU,
    F.layer_norm: _LAYER_NORM,
    torch.layer_norm: _LAYER_NORM,
}

OWN: tuple[tuple[type[nn.Module], Route], ...] = (
    (nn.Linear, _LINEAR),
    (nn.GELU, _GELU),
    (nn.LayerNorm, _LAYER_NORM),
)
"""Modules whose own computation is one call: that call's layer has the module's name."""


def own_route(module: nn.Module) -> Route | None:
    """The route of the call that `module` itself is; None for a module that is no layer by itself."""
    return next((route for kind, route in OWN if isinstance(module, kind)), None)
