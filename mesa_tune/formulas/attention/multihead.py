"""`F.multi_head_attention_forward` (`nn.MultiheadAttention`) as the products and the attention inside it.

It arrives as one call, and hooks on its insides would break Rule 7. So it is composed here, operation for
operation in PyTorch's order and layout (Rule 1), and each part saves what its own formula says, all under the
one layer's settings.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Layers, Route, Routes
from mesa_tune.formulas import linear, matmul, softmax
from mesa_tune.formulas.attention import attention

_ROUTES = linear.ROUTES | softmax.ROUTES | attention.ROUTES | matmul.ROUTES


class _Weights(NamedTuple):
    packed: Tensor | None
    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None


def _part(call: Call, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call.part(_ROUTES[function], function, *args, **kwargs)


def multi_head_attention(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Route of `F.multi_head_attention_forward`: query `(L, N, E)` or `(L, E)`; self or cross, masks."""
    rare = (bias_k, bias_v, static_k, static_v)
    if add_zero_attn or any(tensor is not None for tensor in rare):
        return call.refuse("bias_k, bias_v, static_k, static_v and add_zero_attn have no formula")
    if not _regular(query, key, value, attn_mask, key_padding_mask, embed_dim_to_check, num_heads):
        return call.plain()
    if is_causal and attn_mask is None:
        return call.plain()
    batched = query.dim() == 3
    if not batched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    packed = None if use_separate_proj_weight else in_proj_weight
    weights = _Weights(packed, q_proj_weight, k_proj_weight, v_proj_weight, in_proj_bias)
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _merged(attn_mask, key_padding_mask, query, num_heads)
    q, k, v = (_heads(each, num_heads) for each in _project(call, weights, query, key, value))
    rate = dropout_p if training else 0.0
    y, seen = (
        _weighted(call, q, k, v, mask, rate)
        if need_weights
        else (_fused(call, q, k, v, mask, rate, causal, query.shape[1]), None)
    )
    y = _part(call, F.linear, y.reshape(-1, query.shape[2]), out_proj_weight, out_proj_bias)
    y = y.view(*query.shape[:2], y.size(1))
    if seen is not None:
        seen = seen.view(query.shape[1], num_heads, query.shape[0], -1)
        seen = seen.mean(dim=1) if average_attn_weights else seen
    if batched:
        return y, seen
    return y.squeeze(1), None if seen is None else seen.squeeze(0)


def _regular(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    width: int,
    heads: int,
) -> bool:
    """False for what PyTorch rejects; it then does so in its own words."""
    if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
        return False
    count = query.shape[1] if query.dim() == 3 else 1
    size = (query.shape[0], key.shape[0])
    if mask is not None and tuple(mask.shape) not in (size, (count * heads, *size)):
        return False
    if padding is not None and padding.dim() != query.dim() - 1:
        return False
    return query.shape[-1] == width and width % heads == 0 and key.shape[:-1] == value.shape[:-1]


def _project(call: Call, weights: _Weights, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
    each: tuple[Tensor | None, ...]
    biases = (None, None, None) if weights.bias is None else weights.bias.chunk(3)
    if weights.packed is None:
        each = (weights.q, weights.k, weights.v)
    elif key is value:
        width = query.shape[-1]
        if query is key:
            return _split(_part(call, F.linear, query, weights.packed, weights.bias), 3)
        first, both = weights.packed.split([width, 2 * width])
        low, high = (None, None) if weights.bias is None else weights.bias.split([width, 2 * width])
        q = _part(call, F.linear, query, first, low)
        return q, *_split(_part(call, F.linear, key, both, high), 2)
    else:
        each = weights.packed.chunk(3)
    return [
        _part(call, F.linear, given, weight, bias)
        for given, weight, bias in zip((query, key, value), each, biases, strict=True)
    ]


def _split(joint: Tensor, count: int) -> tuple[Tensor, ...]:
    """One product's result as `count` tensors, each contiguous, as PyTorch lays them out."""
    apart = joint.unflatten(-1, (count, -1)).unsqueeze(0).transpose(0, -2).squeeze(-2)
    return tuple(apart.contiguous().unbind(0))


def _heads(x: Tensor, heads: int) -> Tensor:
    length, count, width = x.shape
    return x.view(length, count * heads, width // heads).transpose(0, 1)


def _merged(mask: Tensor | None, padding: Tensor | None, query: Tensor, heads: int) -> Tensor | None:
    """Attention mask and padding mask as one that is added: `(1 or N·heads, 1 or L, S)`."""
    mask = _additive(mask, query.dtype)
    mask = mask.unsqueeze(0) if mask is not None and mask.dim() == 2 else mask
    padding = _additive(padding, query.dtype)
    if padding is None:
        return mask
    count, length = padding.shape
    padding = padding.view(count, 1, 1, length).expand(-1, heads, -1, -1).reshape(count * heads, 1, length)
    return padding if mask is None else mask + padding


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def _weighted(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float
) -> tuple[Tensor, Tensor]:
    scaled = q * math.sqrt(1.0 / q.shape[-1])
    if mask is None:
        scores = _part(call, torch.bmm, scaled, k.transpose(-2, -1))
    else:
        scores = _part(call, torch.baddbmm, mask, scaled, k.transpose(-2, -1))
    seen = _part(call, F.softmax, scores, dim=-1)
    seen = F.dropout(seen, p=rate) if rate > 0 else seen
    return _part(call, torch.bmm, seen, v).transpose(0, 1), seen


def _fused(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, causal: bool, count: int
) -> Tensor:
    q, k, v = (each.view(count, -1, each.shape[1], each.shape[2]) for each in (q, k, v))
    if mask is not None:
        mask = mask.unsqueeze(0) if mask.size(0) == 1 else mask.view(count, -1, *mask.shape[1:])
    y: Tensor = _part(call, F.scaled_dot_product_attention, q, k, v, mask, rate, causal)
    return y.permute(2, 0, 1, 3)


ROUTES: Routes = {
    F.multi_head_attention_forward: Route("multi_head_attention_forward", "attention", multi_head_attention)
}
LAYERS: Layers = {nn.MultiheadAttention: F.multi_head_attention_forward}
