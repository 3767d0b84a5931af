"""Dropout and its family, y = x m / (1 − p). Kept: the mask m, one bit an element, exact; dx = g m / (1 − p).

Each draws from torch's generator what PyTorch draws, and computes y as it does. PyTorch keeps m / (1 − p)
in x's dtype, or a byte an element where one kernel does it all (CUDA, compiled code). The α forms scale and
shift so that mean and variance stay; the feature forms drop whole channels.
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
    Layers,
    Needs,
    Rebuild,
    References,
    Result,
    Route,
    Routes,
    Static,
    Tensors,
)

_ALPHA = 1.7580993408473766  # of a SELU, negated: what dropped elements become


def forward(static: Static, needs: Needs, x: Tensor) -> Result:
    p, feature, alpha, in_place = static
    fused = not (feature or alpha or in_place)
    if fused and (x.is_cuda or torch.compiler.is_compiling()):
        y, mask = torch.native_dropout(x, p, True)
        return Result(y, exact=(ops.pack_bits(mask),))
    noise = _noise_like(x, feature).bernoulli_(1 - p)
    mask = ops.pack_bits(noise != 0)
    shift = None
    if alpha:
        shift = noise.add(-1).mul_(_ALPHA * _scale(static)).add_(_ALPHA * _scale(static) * p)
        noise.mul_(_scale(static))
    else:
        noise.div_(1 - p)
    y = x.mul_(noise) if in_place else x * noise
    return Result(y if shift is None else y.add_(shift), exact=(mask,), in_place=in_place)


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None]:
    p, feature, alpha, _ = static
    shape = _feature_shape(grad) if feature else tuple(grad.shape)
    noise = ops.unpack_bits(exact[0], shape).to(grad.dtype)
    return (grad * (noise.mul_(_scale(static)) if alpha else noise.div_(1 - p)),)


def _scale(static: Static) -> float:
    """The α forms' factor."""
    p = static[0]
    return 1 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))


def _noise_like(x: Tensor, feature: bool) -> Tensor:
    return x.new_empty(_feature_shape(x)) if feature else torch.empty_like(x)


def _feature_shape(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], *[1] * (x.dim() - 2))


def dropped(
    static: Static, lossy: Tensors, exact: Tensors, references: References, inputs: Tensors
) -> Tensor:
    """The input, made again, where the mask of the forward lets it through."""
    (x,), (mask,) = inputs, exact
    return x * ops.unpack_bits(mask, x.shape).to(x.dtype).div_(1 - static[0])


def _is_plain(static: Static, needs: Needs) -> bool:
    _, feature, alpha, _ = static
    return not (feature or alpha)


DROPOUT = Formula(
    "dropout",
    forward,
    backward,
    "nothing lossy; exact: what was not dropped, one bit an element",
    lossless=True,
    rebuild=Rebuild(dropped, kept=(), exact=(0,), inputs=(0,), when=_is_plain),
)


def _serve(call: Call, x: Tensor, p: float, training: bool, static: tuple[bool, bool, bool]) -> Any:
    feature, alpha, in_place = static
    if not training or not 0 < p < 1 or not x.requires_grad:
        return call.plain()
    if x.numel() <= call.spec.min_elements or x.numel() == 0:
        return call.plain()
    if in_place and not call.changes(x):
        return call.plain()
    return call.apply(DROPOUT, (p, feature, alpha, in_place), x)


def dropout(
    call: Call, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **unknown: Any
) -> Any:
    """`F.dropout`."""
    if unknown:
        return call.refuse(f"dropout has no formula for {sorted(unknown)}")
    return _serve(call, input, p, training, (False, False, inplace))


def torch_dropout(call: Call, input: Tensor, p: float, train: bool) -> Any:
    """`torch.dropout`."""
    return dropout(call, input, p, train)


def torch_dropout_(call: Call, input: Tensor, p: float, train: bool) -> Any:
    """`torch.dropout_`."""
    return dropout(call, input, p, train, True)


def feature_dropout(
    dims: int, call: Call, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """`F.dropout1d`, `2d`, `3d`: drops channels of inputs `(n, channels, *)` of `dims` dimensions."""
    if input.dim() != dims:
        return call.plain()
    return _serve(call, input, p, training, (True, False, inplace))


def alpha_dropout(
    feature: bool,
    call: Call,
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    """`F.alpha_dropout`, `F.feature_alpha_dropout`."""
    if feature and input.dim() < 2:
        return call.plain()
    return _serve(call, input, p, training, (feature, True, inplace))


ROUTES: Routes = {
    F.dropout: Route("dropout", "dropout", dropout),
    torch.dropout: Route("dropout", "dropout", torch_dropout),
    torch.dropout_: Route("dropout", "dropout", torch_dropout_),
    F.dropout1d: Route("dropout1d", "dropout", partial(feature_dropout, 3)),
    F.dropout2d: Route("dropout2d", "dropout", partial(feature_dropout, 4)),
    F.dropout3d: Route("dropout3d", "dropout", partial(feature_dropout, 5)),
    F.alpha_dropout: Route("alpha_dropout", "dropout", partial(alpha_dropout, False)),
    F.feature_alpha_dropout: Route("feature_alpha_dropout", "dropout", partial(alpha_dropout, True)),
}
LAYERS: Layers = {
    nn.Dropout: F.dropout,
    nn.Dropout1d: F.dropout1d,
    nn.Dropout2d: F.dropout2d,
    nn.Dropout3d: F.dropout3d,
    nn.AlphaDropout: F.alpha_dropout,
    nn.FeatureAlphaDropout: F.feature_alpha_dropout,
}
