"""Batch and instance norms. Saved: the normalized input x̂, packed, and r by channel, exact (Rule 7).

y = γ x̂ + β with x̂ = r (x − μ);  dγ = Σ g x̂,  dβ = Σ g,  dx = r (ĝ − mean(ĝ) − x̂ mean(ĝ x̂)) with ĝ = γ g;
see `layer_norm`. A batch norm with fixed statistics has dx = r ĝ, and saves x̂ only if γ wants a gradient. An
instance norm is the batch norm of one sample that has every sample's channels.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import (
    Formula,
    Grads,
    Layers,
    Needs,
    Rebuild,
    Result,
    Route,
    Routes,
    Saved,
    Static,
)
from mesa_tune.engine.tensors import layout_of, wanted
from mesa_tune.formulas.norms.layer_norm import by_channel, normalized_input, saves_less
from mesa_tune.ops import maps
from mesa_tune.ops.fused import BATCH_NORM_BACKWARD


def batch_norm_forward(static: Static, needs: Needs, x: Tensor, *others: Tensor | None) -> Result:
    training, momentum, eps, _ = static
    weight, _, running_mean, running_var = others
    arguments: Any = (x, *others, training, momentum, eps)
    if x.is_cpu:
        y, mean, rstd = torch.native_batch_norm(*arguments)
    else:  # what PyTorch's own layer calls, and which chooses that one on the CPU
        y, mean, rstd, *_ = torch.ops.aten._batch_norm_impl_index(*arguments, torch.backends.cudnn.enabled)
    if not (needs[0] or needs[1]):
        return Result(y)
    if not training:
        assert running_mean is not None
        assert running_var is not None
        mean, rstd = running_mean, (running_var + eps).rsqrt()
    if not (training or needs[1]):
        return Result(y, exact=(rstd, weight))

    def make() -> Tensor:
        return (x - _by_channel(mean, x)).mul_(_by_channel(rstd, x))

    normalized = normalized_input(
        x,
        maps.Deferred(x, "normalize", make, mean.float(), rstd.float(), math.prod(x.shape[2:])),
        # With weight r and fixed statistics, of variance 1.
        lambda: torch.native_batch_norm(x, rstd, None, mean, torch.ones_like(mean), False, 0.0, 0.0)[0],
    )
    return Result(y, lossy=(normalized,), exact=(rstd, weight))


def batch_norm_backward(saved: Saved, grad: Tensor) -> Grads:
    """Return the gradients: in one pass over the packed x̂, from some samples of a large x̂ at a time, or from
    all of it.
    """
    if saved.lossy:
        grads = _fused(saved, grad) or _by_samples(saved, grad) or _whole(saved, grad)
    else:
        dx = (grad * _scale(saved, grad)).to(grad.dtype) if saved.needs[0] else None
        grads = (dx, None, grad.sum(_all_but_channels(grad)) if saved.needs[2] else None)
    return *wanted(grads, saved.needs[:3]), None, None


def _fused(saved: Saved, grad: Tensor) -> Grads | None:
    x, (rstd, weight) = saved.lossy[0], saved.exact
    last = not x.is_row_major()
    if x.codec is None or x.shape != grad.shape or (last and not x.has_channels_last()):
        return None
    laid_out, training = grad.movedim(1, -1) if last else grad, saved.static[0]
    grads: Grads | None = x.fused(BATCH_NORM_BACKWARD, laid_out, rstd, weight, last, not training)
    if grads is None or not last:
        return grads
    dx, *others = grads
    assert dx is not None
    return dx.movedim(-1, 1), *others


def _by_samples(saved: Saved, grad: Tensor) -> Grads | None:
    """Return the gradients from x̂ decoded twice: for the sums over all samples, then for dx."""
    x = saved.lossy[0]
    slices = x.slices(grad.dtype) if grad.dtype == torch.float32 else None
    if slices is None:
        return None
    axes = _all_but_channels(grad)
    dw = torch.stack([part.mul_(grad[index]).sum(axes) for index, part in slices]).sum(0)
    db, scale = grad.sum(axes), _scale(saved, grad)
    if not (saved.needs[0] and saved.static[0]):
        return grad * scale if saved.needs[0] else None, dw, db
    count = grad.numel() // grad.shape[1]
    shift, slope = (-scale * _by_channel(total, grad) / count for total in (db, dw))
    dx = torch.empty_like(grad)
    for index, part in x.slices(grad.dtype) or ():
        dx[index] = part.mul_(slope).add_(shift).addcmul_(grad[index], scale)
    return dx, dw, db


def _whole(saved: Saved, grad: Tensor) -> Grads:
    (training, _, _, layout), needs, (x,), (rstd, weight) = saved
    # In terms of x̂ the statistics are mean 0 and reciprocal deviation 1; dx then has the factor γ r.
    statistics = torch.zeros_like(rstd), torch.ones_like(rstd)
    dx, dw, db = torch.ops.aten.native_batch_norm_backward(
        grad,
        x.whole().contiguous(memory_format=layout),
        _factors(rstd, weight),
        *((None, None, *statistics) if training else (*statistics, None, None)),
        training,
        0.0,
        list(needs[:3]),
    )
    return dx if needs[0] else None, dw, db


def _scale(saved: Saved, grad: Tensor) -> Tensor:
    """Return γ r by channel."""
    return _by_channel(_factors(*saved.exact), grad)


def _factors(rstd: Tensor, weight: Tensor | None) -> Tensor:
    return rstd if weight is None else rstd * weight


def _all_but_channels(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view([1, -1] + [1] * (x.dim() - 2))


BATCH_NORM = Formula(
    "batch_norm",
    batch_norm_forward,
    batch_norm_backward,
    "the normalized input; exact: reciprocal deviations by channel",
    rebuild=Rebuild(
        by_channel, references=(1, 2), when=lambda static, needs: needs[1] or (needs[0] and static[0])
    ),
)


def instance_norm_forward(static: Static, needs: Needs, x: Tensor, *others: Tensor | None) -> Result:
    weight, bias, *statistics = others
    wide = _repeated(weight, x.shape[0]), _repeated(bias, x.shape[0])
    result = batch_norm_forward(static, needs, _one_sample(x), *wide, *statistics)
    return result._replace(output=result.output.view(x.shape))


def instance_norm_backward(saved: Saved, grad: Tensor) -> Grads:
    dx, *sums = batch_norm_backward(saved, _one_sample(grad))
    sums = [None if total is None else total.view(grad.shape[:2]).sum(0) for total in sums]
    return None if dx is None else dx.view(grad.shape), *sums


def _one_sample(x: Tensor) -> Tensor:
    return x.contiguous().view(1, x.shape[0] * x.shape[1], *x.shape[2:])


def _repeated(tensor: Tensor | None, samples: int) -> Tensor | None:
    return None if tensor is None else tensor.repeat(samples)


INSTANCE_NORM = Formula(
    "instance_norm", instance_norm_forward, instance_norm_backward, BATCH_NORM.saves, views=True
)


def batch_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Route of `F.batch_norm`: input `(n, channels, *)`; updates the running statistics as PyTorch does."""
    if input.dim() < 2:
        return call.refuse("batch_norm has a formula only for inputs (n, channels, *)")
    if not saves_less(call, input) or not _valid(input, training, running_mean, running_var, eps):
        return call.plain()
    static = (training, momentum, eps, layout_of(input))
    return call.apply(BATCH_NORM, static, input, weight, bias, running_mean, running_var)


def _valid(input: Tensor, training: bool, mean: Tensor | None, var: Tensor | None, eps: float) -> bool:
    """Return False where `F.batch_norm` raises: it then does so by itself."""
    if training:
        return input.numel() > input.shape[1] and eps > 0
    return mean is not None and var is not None and eps >= 0


def instance_norm(
    call: Call,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Route of `F.instance_norm`: input `(n, channels, *)`; running statistics: means over samples."""
    needed = any(tensor is not None and tensor.requires_grad for tensor in (input, weight, bias))
    valid = _has_instances(input, use_input_stats, running_mean, running_var)
    if not (needed and valid and saves_less(call, input)):
        return call.plain()
    static = (use_input_stats, momentum, eps, torch.contiguous_format)
    samples, channels = input.shape[:2]
    mean, var = _repeated(running_mean, samples), _repeated(running_var, samples)
    y = call.apply(INSTANCE_NORM, static, input, weight, bias, mean, var)
    # After what autograd saves, as PyTorch does: checkpointing stops its second run there.
    for running, repeated in ((running_mean, mean), (running_var, var)):
        if use_input_stats and running is not None and repeated is not None:
            running.copy_(repeated.view(samples, channels).mean(0))
    return y


def torch_instance_norm(
    call: Call,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Route of `torch.instance_norm`."""
    return instance_norm(call, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _has_instances(input: Tensor, own: bool, mean: Tensor | None, var: Tensor | None) -> bool:
    """Return whether `F.instance_norm` accepts the input; if not, the plain call raises PyTorch's error."""
    if input.dim() < 3 or input.numel() == 0:
        return False
    return input[0, 0].numel() > 1 if own else mean is not None and var is not None


ROUTES: Routes = {
    F.batch_norm: Route("batch_norm", "bn", batch_norm),
    F.instance_norm: Route("instance_norm", "instancenorm", instance_norm),
    torch.instance_norm: Route("instance_norm", "instancenorm", torch_instance_norm),
}
LAYERS: Layers = {
    nn.modules.batchnorm._BatchNorm: F.batch_norm,
    nn.modules.instancenorm._InstanceNorm: F.instance_norm,
}
