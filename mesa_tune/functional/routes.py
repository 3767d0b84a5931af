"""Which torch function goes to which of ours, under which tag and name; and which layer a module *is*."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.functional import activation, attention, conv, fc, loss, multihead, norm, products


class Route(NamedTuple):
    """`name` stands in layer names (`attn.softmax.0`), `tag` in policies; `serve(call, *args)` does it."""

    name: str
    tag: str
    serve: Callable[..., Any]


_LINEAR = Route("linear", "fc", fc.linear)
_CONV1D = Route("conv1d", "conv", conv.conv)
_CONV2D = Route("conv2d", "conv", conv.conv)
_CONV3D = Route("conv3d", "conv", conv.conv)
_BATCH_NORM = Route("batch_norm", "bn", norm.batch_norm)
_LAYER_NORM = Route("layer_norm", "layernorm", norm.layer_norm)
_GELU = Route("gelu", "gelu", activation.gelu)
_RELU = Route("relu", "relu", activation.relu)
_RELU_ = Route("relu", "relu", activation.relu_)
_SOFTMAX = Route("softmax", "softmax", activation.softmax)
_F_SOFTMAX = Route("softmax", "softmax", activation.functional_softmax)
_MATMUL = Route("matmul", "matmul", products.matmul)
_BMM = Route("bmm", "matmul", products.product)
_MM = Route("mm", "matmul", products.product)
_ADDMM = Route("addmm", "fc", products.addmm)
_BADDBMM = Route("baddbmm", "matmul", products.baddbmm)
_ATTENTION = Route("scaled_dot_product_attention", "attention", attention.scaled_dot_product_attention)
_MULTI_HEAD = Route("multi_head_attention_forward", "attention", multihead.multi_head_attention)
_CROSS_ENTROPY = Route("cross_entropy", "loss", loss.cross_entropy)

ROUTES: dict[Callable[..., Any], Route] = {
    F.linear: _LINEAR,
    torch.addmm: _ADDMM,
    Tensor.addmm: _ADDMM,
    F.conv1d: _CONV1D,
    F.conv2d: _CONV2D,
    F.conv3d: _CONV3D,
    F.batch_norm: _BATCH_NORM,
    F.layer_norm: _LAYER_NORM,
    torch.layer_norm: _LAYER_NORM,
    F.gelu: _GELU,
    F.relu: _RELU,
    torch.relu: _RELU,
    Tensor.relu: _RELU,
    torch.relu_: _RELU_,
    Tensor.relu_: _RELU_,
    F.softmax: _F_SOFTMAX,
    torch.softmax: _SOFTMAX,
    torch.special.softmax: _SOFTMAX,
    Tensor.softmax: _SOFTMAX,
    torch.matmul: _MATMUL,
    torch.linalg.matmul: _MATMUL,
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    torch.bmm: _BMM,
    Tensor.bmm: _BMM,
    torch.mm: _MM,
    Tensor.mm: _MM,
    torch.baddbmm: _BADDBMM,
    Tensor.baddbmm: _BADDBMM,
    F.scaled_dot_product_attention: _ATTENTION,
    F.multi_head_attention_forward: _MULTI_HEAD,
    F.cross_entropy: _CROSS_ENTROPY,
}

OWN: tuple[tuple[type[nn.Module], Route], ...] = (
    (nn.Linear, _LINEAR),
    (nn.Conv1d, _CONV1D),
    (nn.Conv2d, _CONV2D),
    (nn.Conv3d, _CONV3D),
    (nn.modules.batchnorm._BatchNorm, _BATCH_NORM),
    (nn.LayerNorm, _LAYER_NORM),
    (nn.GELU, _GELU),
    (nn.ReLU, _RELU),
    (nn.Softmax, _F_SOFTMAX),
    (nn.Softmax2d, _F_SOFTMAX),
    (products.MatMul, _MATMUL),
    (nn.MultiheadAttention, _MULTI_HEAD),
    (nn.CrossEntropyLoss, _CROSS_ENTROPY),
)
"""Modules whose own computation is one call: that call's layer has the module's name."""


def own_route(module: nn.Module) -> Route | None:
    """The route of the call that `module` itself is; None for a module that is no layer by itself."""
    return next((route for kind, route in OWN if isinstance(module, kind)), None)
