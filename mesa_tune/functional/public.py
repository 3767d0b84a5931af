"""The functions as torch's own twins, for code that calls them by name: torch's arguments, and `settings`.

Each runs PyTorch's forward bit for bit and keeps for backward what its formula says, encoded by `settings`,
tensors of any size included. Standing alone they know no batch: only parameters are kept as they are. Inside
a converted model, and inside `compress_saved`, the policy decides instead, and `settings` rest.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mesa_tune import routing
from mesa_tune.codecs import Spec
from mesa_tune.functional.call import Call
from mesa_tune.functional.conv import Size
from mesa_tune.functional.routes import ROUTES
from mesa_tune.ops import GOLDEN
from mesa_tune.settings import LayerSettings

_DEFAULT = LayerSettings()
_STEP = GOLDEN - 2**64  # odd, so that the count runs through all keys
_counts = {"cpu": torch.zeros(1, dtype=torch.int64)}


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, settings: LayerSettings = _DEFAULT
) -> Any:
    """`F.linear`; keeps the input."""
    return alone(F.linear, settings, input, weight, bias)


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    settings: LayerSettings = _DEFAULT,
) -> Any:
    """`F.conv1d`; keeps the input."""
    return alone(F.conv1d, settings, input, weight, bias, stride, padding, dilation, groups)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    settings: LayerSettings = _DEFAULT,
) -> Any:
    """`F.conv2d`; keeps the input."""
    return alone(F.conv2d, settings, input, weight, bias, stride, padding, dilation, groups)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    settings: LayerSettings = _DEFAULT,
) -> Any:
    """`F.conv3d`; keeps the input."""
    return alone(F.conv3d, settings, input, weight, bias, stride, padding, dilation, groups)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    settings: LayerSettings = _DEFAULT,
) -> Any:
    """`F.batch_norm`; keeps the normalized input."""
    given = (input, running_mean, running_var, weight, bias, training, momentum, eps)
    return alone(F.batch_norm, settings, *given)


def layer_norm(
    input: Tensor,
    normalized_shape: list[int] | tuple[int, ...],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    settings: LayerSettings = _DEFAULT,
) -> Any:
    """`F.layer_norm`; keeps the normalized input."""
    return alone(F.layer_norm, settings, input, normalized_shape, weight, bias, eps)


def gelu(input: Tensor, approximate: str = "none", *, settings: LayerSettings = _DEFAULT) -> Any:
    """`F.gelu`; keeps the input."""
    return alone(F.gelu, settings, input, approximate=approximate)


def relu(input: Tensor, inplace: bool = False, *, settings: LayerSettings = _DEFAULT) -> Any:
    """`F.relu`; keeps one exact bit an element."""
    return alone(F.relu, settings, input, inplace)


def softmax(
    input: Tensor,
    dim: int,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    settings: LayerSettings = _DEFAULT,
) -> Any:
    """`F.softmax`; keeps the output."""
    return alone(F.softmax, settings, input, dim, _stacklevel, dtype)


def matmul(input: Tensor, other: Tensor, *, settings: LayerSettings = _DEFAULT) -> Any:
    """`torch.matmul`; keeps each operand whose partner wants a gradient."""
    return alone(torch.matmul, settings, input, other)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    settings: LayerSettings = _DEFAULT,
) -> Any:
    """`F.scaled_dot_product_attention`; keeps queries, keys and values."""
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    return alone(F.scaled_dot_product_attention, settings, *given, scale=scale, enable_gqa=enable_gqa)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    settings: LayerSettings = _DEFAULT,
) -> Any:
    """`F.cross_entropy`; keeps the logits."""
    given = (input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    return alone(F.cross_entropy, settings, *given)


def alone(function: Callable[..., Any], settings: LayerSettings, *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, one of `ROUTES`, keeping by `settings` unless a policy is at work."""
    spec = Spec.of(settings, 0)
    if spec is None or policy_at_work() or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    route = ROUTES[function]
    call = Call(route.name, spec, _key, _is_parameter, lambda: function(*args, **kwargs))
    return route.serve(call, *args, **kwargs)


class StandingAlone(TorchFunctionMode):
    """While this is entered, torch's functions run as their twins here do, by one layer's settings."""

    def __init__(self, settings: LayerSettings) -> None:
        super().__init__()
        self.settings = settings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ROUTES:
            return alone(func, self.settings, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def policy_at_work() -> bool:
    """Whether this runs inside a converted model or `compress_saved`."""
    return routing.state.active


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


def _key(device: torch.device) -> Tensor:
    """The noise key of the next call: the seed, and a private count that leaves torch's generators alone.

    The count is a tensor, so that compiled code sees it move.
    """
    name = str(device)
    if name not in _counts:
        _counts[name] = _counts["cpu"].to(device)
    _counts[name].add_(_STEP)
    key: Tensor = _counts[name] + _seed()
    return key


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _seed() -> int:
    return (torch.initial_seed() + 2**63) % 2**64 - 2**63
