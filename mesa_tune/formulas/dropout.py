"""Dropout and its family, y = x m / (1 − p). Saved: the mask m, exactly, one bit per element.

dx = g m / (1 − p). Each draws from torch's generator what PyTorch draws, and computes y as it does. PyTorch
saves m / (1 − p) in x's dtype, or one byte per element where one kernel does it all (CUDA, compiled code).
The α forms scale and shift so that mean and variance stay; the feature forms drop whole channels.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune import ops
from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import (
    Formula,
    Grads,
    Ingredients,
    Layers,
    Needs,
    Rebuild,
    Result,
    Route,
    Routes,
    Saved,
    Static,
)
from mesa_tune.formulas.convolution import layers, routes

_ALPHA = 1.7580993408473766  # of a SELU, negated: what dropped elements become


def forward(static: Static, needs: Needs, x: Tensor) -> Result:
    p, feature, alpha, in_place = static
    fused = not (feature or alpha or in_place)
    if fused and (x.is_cuda or torch.compiler.is_compiling()):
        y, mask = torch.native_dropout(x, p, True)
        return Result(y, exact=(ops.pack_bits(mask),))
    noise = (x.new_empty(_feature_shape(x)) if feature else torch.empty_like(x)).bernoulli_(1 - p)
    mask = ops.pack_bits(noise != 0)
    shift = None
    if alpha:
        shift = noise.add(-1).mul_(_ALPHA * _scale(p)).add_(_ALPHA * _scale(p) * p)
        noise.mul_(_scale(p))
    else:
        noise.div_(1 - p)
    y = x.mul_(noise) if in_place else x * noise
    return Result(y if shift is None else y.add_(shift), exact=(mask,), in_place=in_place)


def backward(saved: Saved, grad: Tensor) -> Grads:
    p, feature, alpha, _ = saved.static
    mask = ops.unpack_bits(saved.exact[0], _feature_shape(grad) if feature else grad.shape).to(grad.dtype)
    return (grad * (mask.mul_(_scale(p)) if alpha else mask.div_(1 - p)),)


def _scale(p: float) -> float:
    """Return the factor of the α forms."""
    return 1 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))


def _feature_shape(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], *[1] * (x.dim() - 2))


def dropped(given: Ingredients) -> Tensor:
    """Return the output for the input, made again, and the mask of the forward."""
    (x,), (mask,) = given.inputs, given.exact
    return x * ops.unpack_bits(mask, x.shape).to(x.dtype).div_(1 - given.static[0])


DROPOUT = Formula(
    "dropout",
    forward,
    backward,
    "nothing lossy; exact: what was not dropped, one bit per element",
    lossless=True,
    # Of neither whole channels nor the α forms.
    rebuild=Rebuild(dropped, (), exact=(0,), inputs=(0,), when=lambda static, needs: not any(static[1:3])),
)


def _serve(
    call: Call,
    x: Tensor,
    p: float,
    training: bool,
    in_place: bool,
    feature: bool = False,
    alpha: bool = False,
) -> Any:
    drops = training and 0 < p < 1 and x.requires_grad and x.numel() > max(call.spec.min_elements, 0)
    if not drops or (in_place and not call.may_change(x)):
        return call.plain()
    return call.apply(DROPOUT, (p, feature, alpha, in_place), x)


def dropout(call: Call, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Route of `F.dropout`."""
    return _serve(call, input, p, training, inplace)


def torch_dropout(in_place: bool, call: Call, input: Tensor, p: float, train: bool) -> Any:
    """Route of `torch.dropout`."""
    return _serve(call, input, p, train, in_place)


def feature_dropout(
    dims: int, call: Call, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Route of `F.dropout1d`, `2d`, `3d`: drop channels of inputs `(n, channels, *)` with `dims` in `*`."""
    return _serve(call, input, p, training and input.dim() == dims + 2, inplace, feature=True)


def alpha_dropout(
    feature: bool, call: Call, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    """Route of `F.alpha_dropout`, `F.feature_alpha_dropout`."""
    fits = not feature or input.dim() > 1
    return _serve(call, input, p, training and fits, inplace, feature, alpha=True)


ROUTES: Routes = {
    F.dropout: Route("dropout", "dropout", dropout),
    torch.dropout: Route("dropout", "dropout", partial(torch_dropout, False)),
    torch.dropout_: Route("dropout", "dropout", partial(torch_dropout, True)),
    **routes("dropout", "dropout", feature_dropout),
    F.alpha_dropout: Route("alpha_dropout", "dropout", partial(alpha_dropout, False)),
    F.feature_alpha_dropout: Route("feature_alpha_dropout", "dropout", partial(alpha_dropout, True)),
}
LAYERS: Layers = {
    nn.Dropout: F.dropout,
    **layers("Dropout", "dropout"),
    nn.AlphaDropout: F.alpha_dropout,
    nn.FeatureAlphaDropout: F.feature_alpha_dropout,
}
