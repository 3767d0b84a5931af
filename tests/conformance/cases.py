"""The functions and layers under test: one line each. To add one: its line in `CASES`.

A case is a module that takes one activation `h` of `shape`; functions of several tensors cut theirs out of
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One function or layer. `module()` makes it; `tags`: of the layers that it holds.

    `lossless`: what it keeps is exact. `saturates`: at a huge scale few elements have a gradient, and
    those are lost among the large ones of their groups. `min_batch`: the smallest batch that PyTorch takes.
    """

    id: str
    shape: Shape
    module: Callable[[], nn.Module]
    tags: str
    lossless: bool = False
    min_batch: int = 0
    saturates: bool = False


class Direct(nn.Module):
    """Calls `function(h, **parameters)`, as a model that uses no layers does."""

    def __init__(self, function: Callable[..., Tensor], **shapes: Shape) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5))

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h, **self._parameters)


def _direct(function: Callable[..., Tensor], **shapes: Shape) -> Callable[[], nn.Module]:
    return lambda: Direct(function, **shapes)


def _of_halves(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda h, **parameters: function(*h.chunk(2, -1), **parameters)


def _addmm(h: Tensor, w: Tensor, b: Tensor) -> Any:
    return torch.addmm(b, h.flatten(0, 1), w).unflatten(0, h.shape[:2])


def _relu_in_place(h: Tensor) -> Tensor:
    return (h + 0).relu_()


def _explicit_attention(h: Tensor) -> Tensor:
    q, k, v = h.chunk(3, -1)
    return F.softmax(q @ k.transpose(-2, -1), dim=-1) @ v


def _heads(h: Tensor, count: int) -> Any:
    return h.unflatten(-1, (count, -1)).transpose(1, 2)


def _attention(h: Tensor, **kwargs: Any) -> Tensor:
    q, k, v = (_heads(part, 2) for part in h.chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, **kwargs).transpose(1, 2).flatten(2)


def _attention_grouped(h: Tensor) -> Tensor:
    q, k, v = h.split([32, 16, 16], -1)
    q, k, v = _heads(q, 4), _heads(k, 2), _heads(v, 2)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


def _cross_entropy(h: Tensor) -> Tensor:
    target = torch.arange(h.shape[0] * h.shape[1]) % h.shape[2]
    return F.cross_entropy(h.flatten(0, 1), target, label_smoothing=0.1, reduction="sum")


def _gated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def _new_gelu(h: Tensor) -> Tensor:
    return 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * torch.pow(h, 3.0))))


def _sine_loss(loss: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda h: loss(h, h.detach().sin(), reduction="sum")


def _share(h: Tensor) -> Tensor:
    weight = torch.exp(h.clamp(-2, 2))
    return weight / weight.sum(-1, keepdim=True)


def _rotary(h: Tensor) -> Tensor:
    angle = torch.arange(h.shape[-2] * h.shape[-1]).view(h.shape[-2:]) / 100
    first, second = h.chunk(2, -1)
    return h * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


def _nll(h: Tensor) -> Tensor:
    target = torch.arange(h.shape[0] * h.shape[1]) % h.shape[2]
    return F.nll_loss(F.log_softmax(h.flatten(0, 1), -1), target, reduction="sum")


def _bce(h: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(h, (h.detach() > 0.3).to(h.dtype), reduction="sum")


def _max_with_indices(h: Tensor) -> Tensor:
    values, indices = F.max_pool2d(h, 3, return_indices=True)
    return values * (1 + indices)


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` of h with itself."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, h: Tensor) -> Any:
        return self.attention(h, h, h, need_weights=self.need_weights)[0]


_BAND = torch.ones(24, 24, dtype=torch.bool).tril(1)
_TOKENS = (4, 24, 32)
_IMAGES = (4, 6, 12, 12)

CASES: tuple[Case, ...] = (
    Case("Linear", _TOKENS, lambda: nn.Linear(32, 40), "fc"),
    Case("F.linear", _TOKENS, _direct(F.linear, weight=(40, 32)), "fc"),
    Case("addmm", _TOKENS, _direct(_addmm, w=(32, 40), b=(40,)), "fc"),
    Case("Conv1d", (4, 6, 96), lambda: nn.Conv1d(6, 8, 3, stride=2), "conv"),
    Case("Conv2d", _IMAGES, lambda: nn.Conv2d(6, 8, 3, padding=1), "conv"),
    Case("Conv3d", (2, 4, 6, 8, 8), lambda: nn.Conv3d(4, 4, 3), "conv"),
    Case(
        "F.conv2d-same-groups",
        _IMAGES,
        _direct(partial(F.conv2d, padding="same", groups=2), weight=(8, 3, 4, 4)),
        "conv",
    ),
    Case("ConvTranspose1d", (4, 6, 48), lambda: nn.ConvTranspose1d(6, 8, 3, stride=2), "conv"),
    Case(
        "ConvTranspose2d",
        _IMAGES,
        lambda: nn.ConvTranspose2d(6, 8, 3, 2, 1, output_padding=1, groups=2, dilation=2),
        "conv",
    ),
    Case("ConvTranspose3d", (2, 4, 4, 6, 6), lambda: nn.ConvTranspose3d(4, 4, 3), "conv"),
    Case("bilinear", _TOKENS, _direct(_of_halves(F.bilinear), weight=(20, 16, 16)), "fc"),
    Case("BatchNorm1d", (64, 48), lambda: nn.BatchNorm1d(48), "bn", min_batch=2),
    Case("BatchNorm2d", _IMAGES, lambda: nn.BatchNorm2d(6), "bn", min_batch=2),
    Case("BatchNorm3d", (2, 4, 6, 8, 8), lambda: nn.BatchNorm3d(4, momentum=None), "bn", min_batch=2),
    Case("SyncBatchNorm", _IMAGES, lambda: nn.SyncBatchNorm(6), "bn", min_batch=2),
    Case("InstanceNorm1d", (4, 6, 96), lambda: nn.InstanceNorm1d(6), "instancenorm"),
    Case(
        "InstanceNorm2d",
        _IMAGES,
        partial(nn.InstanceNorm2d, 6, affine=True, track_running_stats=True),
        "instancenorm",
        min_batch=1,
    ),
    Case("GroupNorm", _IMAGES, lambda: nn.GroupNorm(3, 6), "groupnorm"),
    Case("RMSNorm", _TOKENS, lambda: nn.RMSNorm(32), "rmsnorm"),
    Case("LayerNorm", _TOKENS, lambda: nn.LayerNorm(32), "layernorm"),
    Case("F.layer_norm", _TOKENS, _direct(partial(F.layer_norm, normalized_shape=(32,))), "layernorm"),
    Case("GELU", _TOKENS, nn.GELU, "gelu"),
    Case("F.gelu-tanh", _TOKENS, _direct(partial(F.gelu, approximate="tanh")), "gelu"),
    Case("ReLU", _TOKENS, nn.ReLU, "relu", lossless=True),
    Case("relu_", _TOKENS, _direct(_relu_in_place), "relu", lossless=True),
    Case("SiLU", _TOKENS, nn.SiLU, "silu"),
    Case("silu-in-place", _TOKENS, _direct(lambda h: F.silu(h + 0, inplace=True)), "silu"),
    Case("SwiGLU", _TOKENS, _direct(_gated), "silu mul"),
    Case("NewGELU", _TOKENS, _direct(_new_gelu), "pointwise mul", saturates=True),
    Case(
        "quick-GELU", _TOKENS, _direct(lambda h: h * (1.702 * h).sigmoid()), "pointwise mul", saturates=True
    ),
    Case("Mish", _TOKENS, nn.Mish, "pointwise"),
    Case("ELU", _TOKENS, lambda: nn.ELU(0.7), "pointwise"),
    Case("Softplus", _TOKENS, lambda: nn.Softplus(1.5), "pointwise"),
    Case("Tanh", _TOKENS, nn.Tanh, "pointwise"),
    Case("tanh_", _TOKENS, _direct(lambda h: (h + 0).tanh_()), "pointwise"),
    Case("exp-clamp-div", _TOKENS, _direct(_share), "pointwise relu mul"),
    Case("GLU", _TOKENS, nn.GLU, "mul"),
    Case("mul", _TOKENS, _direct(torch.mul, other=(32,)), "mul"),
    Case("mul_", _TOKENS, _direct(_of_halves(lambda a, b: (a + 0).mul_(b + 0))), "mul"),
    Case("rotary", _TOKENS, _direct(_rotary), "mul pointwise", lossless=True),
    Case(
        "where", _TOKENS, _direct(lambda h: torch.where(h > 0.3, h * 2, -h)), "mul pointwise", lossless=True
    ),
    Case("masked_fill", _TOKENS, _direct(lambda h: h.masked_fill(h < -0.5, -1)), "pointwise", lossless=True),
    Case("LeakyReLU", _TOKENS, lambda: nn.LeakyReLU(0.2), "relu", lossless=True),
    Case("leaky_relu_", _TOKENS, _direct(lambda h: F.leaky_relu_(h + 0, 0.2)), "relu", lossless=True),
    Case("ReLU6", _TOKENS, nn.ReLU6, "relu", lossless=True),
    Case("abs", _TOKENS, _direct(torch.abs), "relu", lossless=True),
    Case("normalize", _TOKENS, _direct(partial(F.normalize, dim=-1)), "reduction"),
    Case("norm", (4, 24, 256), _direct(partial(torch.norm, dim=-1)), "reduction"),
    Case("amax-div", _TOKENS, _direct(lambda h: h / h.abs().amax(-1, True)), "relu pointwise mul"),
    Case(
        "std-div",
        _TOKENS,
        _direct(lambda h: (h - h.mean(-1, True)) / h.std(-1, keepdim=True)),
        "reduction mul",
    ),
    Case("logsumexp", (4, 24, 256), _direct(partial(torch.logsumexp, dim=-1)), "softmax"),
    Case("einsum", _TOKENS, _direct(_of_halves(partial(torch.einsum, "...id,...jd->...ij"))), "matmul"),
    Case("Softmax", _TOKENS, lambda: nn.Softmax(-1), "softmax"),
    Case("F.softmax", _TOKENS, _direct(partial(F.softmax, dim=-1)), "softmax"),
    Case("Tensor.softmax", _TOKENS, _direct(lambda h: h.softmax(1)), "softmax"),
    Case("matmul", _TOKENS, _direct(_of_halves(lambda q, k: q @ k.mT)), "matmul"),
    Case("matmul-broadcast", _TOKENS, _direct(lambda h, w: torch.matmul(w, h), w=(20, 24)), "matmul"),
    Case("bmm", _TOKENS, _direct(_of_halves(lambda q, k: torch.bmm(q, k.mT))), "matmul"),
    Case("softmax-matmul", (4, 24, 48), _direct(_explicit_attention), "softmax matmul"),
    Case("attention", (4, 24, 48), _direct(_attention), "attention"),
    Case("attention-causal", (4, 24, 48), _direct(partial(_attention, is_causal=True)), "attention"),
    Case("attention-mask", (4, 24, 48), _direct(partial(_attention, attn_mask=_BAND)), "attention"),
    Case("attention-bias", (4, 24, 48), _direct(_attention, attn_mask=(24, 24)), "attention"),
    Case("attention-grouped", (4, 24, 64), _direct(_attention_grouped), "attention"),
    Case("MultiheadAttention", _TOKENS, lambda: SelfAttention(False), "attention"),
    Case("MultiheadAttention-weights", _TOKENS, lambda: SelfAttention(True), "attention"),
    Case("LogSoftmax", _TOKENS, lambda: nn.LogSoftmax(-1), "softmax"),
    Case("log_softmax-nll_loss", _TOKENS, _direct(_nll), "softmax loss"),
    Case("mse_loss", _TOKENS, _direct(_sine_loss(F.mse_loss)), "loss pointwise"),
    Case("l1_loss", _TOKENS, _direct(_sine_loss(F.l1_loss)), "loss pointwise", lossless=True),
    Case("bce_with_logits", _TOKENS, _direct(_bce), "loss"),
    Case("Dropout", _TOKENS, lambda: nn.Dropout(0.2), "dropout", lossless=True),
    Case(
        "dropout-in-place",
        _TOKENS,
        _direct(lambda h: F.dropout(h + 0, 0.2, inplace=True)),
        "dropout",
        lossless=True,
    ),
    Case("AlphaDropout", _TOKENS, lambda: nn.AlphaDropout(0.2), "dropout", lossless=True),
    Case("MaxPool1d", (4, 6, 96), lambda: nn.MaxPool1d(3, 2, dilation=2), "maxpool", lossless=True),
    Case("MaxPool2d", _IMAGES, lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), "maxpool", lossless=True),
    Case("MaxPool3d", (2, 4, 6, 8, 8), lambda: nn.MaxPool3d(2), "maxpool", lossless=True),
    Case("max_pool2d-indices", _IMAGES, _direct(_max_with_indices), "maxpool mul", lossless=True),
    Case("AdaptiveMaxPool2d", _IMAGES, lambda: nn.AdaptiveMaxPool2d(5), "maxpool", lossless=True),
    Case("AvgPool2d", _IMAGES, lambda: nn.AvgPool2d(2), "avgpool", lossless=True),
    Case("AdaptiveAvgPool1d", (4, 6, 96), lambda: nn.AdaptiveAvgPool1d(7), "avgpool", lossless=True),
    Case("ReflectionPad2d", _IMAGES, lambda: nn.ReflectionPad2d(2), "pad", lossless=True),
    Case("cross_entropy", _TOKENS, _direct(_cross_entropy), "loss"),
)


def case(name: str) -> Case:
    """The case with that id."""
    return next(each for each in CASES if each.id == name)
