"""Batch and instance normalizations keep the normalized input x̂, encoded, and r by channel, exact (Rule 7).

y = γ x̂ + β with x̂ = r (x − μ);  dγ = Σ g x̂,  dβ = Σ g,  dx = r (ĝ − mean(ĝ) − x̂ mean(ĝ x̂)) with ĝ = γ g;
see `layer_norm`. A batch norm with fixed statistics has dx = r ĝ, and keeps x̂ only if γ wants a gradient. An
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
    Layers,
    Needs,
    Rebuild,
    Result,
    Route,
    Routes,
    Static,
    layout_of,
    unviewed,
    wanted,
)
from mesa_tune.engine.packed import Held
from mesa_tune.formulas.norms.layer_norm import by_channel, kept_anyway
from mesa_tune.ops import maps


def batch_norm_forward(
    static: Static,
    needs: Needs,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
) -> Result:
    training, momentum, eps, _ = static
    given = (x, weight, bias, running_mean, running_var, training, momentum, eps)
    if x.is_cpu:
        y, mean, rstd = torch.native_batch_norm(*given)
    else:  # what PyTorch's own layer calls, and which chooses that one on the CPU
        y, mean, rstd, *_ = torch.ops.aten._batch_norm_impl_index(*given, torch.backends.cudnn.enabled)
    if not (needs[0] or needs[1]):
        return Result(y)
    if not training:
        assert running_mean is not None
        assert running_var is not None
        mean, rstd = running_mean, (running_var + eps).rsqrt()
    if not (training or needs[1]):
        return Result(y, exact=(rstd, weight))
    normalized = maps.kept(
        x,
        "normalize",
        lambda: (x - _by_channel(mean, x)).mul_(_by_channel(rstd, x)).to(x.dtype),
        mean,
        rstd,
        math.prod(x.shape[2:]),
    )
    return Result(y, lossy=(normalized,), exact=(rstd, weight))


def batch_norm_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    training, _, _, layout = static
    rest = (None, None)
    if not lossy:
        db = grad.sum([axis for axis in range(grad.dim()) if axis != 1]) if needs[2] else None
        return (_scaled(grad, exact) if needs[0] else None, None, db, *rest)
    rstd, weight = exact
    assert rstd is not None
    zero, one = torch.zeros_like(rstd), torch.ones_like(rstd)
    dx, dw, db = torch.ops.aten.native_batch_norm_backward(
        grad,
        lossy[0].contiguous(memory_format=layout),
        weight,
        None if training else zero,
        None if training else one,
        zero if training else None,
        one if training else None,
        training,
        0.0,
        [needs[0], needs[1], needs[2]],
    )
    dx = dx.mul_(_by_channel(rstd, dx)) if needs[0] else None
    return (dx, dw if needs[1] else None, db if needs[2] else None, *rest)


def batch_norm_piecewise(
    static: Static, needs: Needs, held: list[Held], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...] | None:
    """In one pass; or x̂ decoded some samples at a time: first for the sums over all, then for dx."""
    if not held or grad.dtype != torch.float32:
        return None
    training, rstd, weight = static[0], *exact
    assert rstd is not None
    found = held[0].batch_norm_backward(grad, rstd, weight, not training)
    if found is not None:
        return (*wanted(found, needs[:3]), None, None)
    sums = _sums(held[0], grad)
    if sums is None:
        return None
    dw, db = sums
    dx = None
    if needs[0] and not training:
        dx = _scaled(grad, exact)
    elif needs[0]:
        scale = rstd if weight is None else rstd * weight
        count = grad.numel() // grad.shape[1]
        shift, slope = (_by_channel(-scale * each / count, grad) for each in (db, dw))
        dx, scale = torch.empty_like(grad), _by_channel(scale, grad)
        pieces = held[0].parts_of(grad.dtype)
        assert pieces is not None
        for part, x in pieces:
            dx[part] = x.mul_(slope).add_(shift).addcmul_(grad[part], scale)
    return (dx, dw if needs[1] else None, db if needs[2] else None, None, None)


def _sums(held: Held, grad: Tensor) -> tuple[Tensor, Tensor] | None:
    """Σ g x̂ and Σ g by channel; None where x̂ has to be decoded as a whole."""
    pieces = held.parts_of(grad.dtype)
    if pieces is None:
        return None
    axes = [axis for axis in range(grad.dim()) if axis != 1]
    dw = torch.stack([x.mul_(grad[part]).sum(axes) for part, x in pieces]).sum(0)
    return dw, grad.sum(axes)


def _scaled(grad: Tensor, exact: tuple[Tensor | None, ...]) -> Tensor:
    rstd, weight = exact
    assert rstd is not None
    scale = rstd if weight is None else rstd * weight
    return (grad * _by_channel(scale, grad)).to(grad.dtype)


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view([1, -1] + [1] * (x.dim() - 2))


def _normalizes(static: Static, needs: Needs) -> bool:
    return needs[1] or (needs[0] and static[0])


BATCH_NORM = Formula(
    "batch_norm",
    batch_norm_forward,
    batch_norm_backward,
    "the normalized input; exact: reciprocal deviations by channel",
    piecewise=batch_norm_piecewise,
    rebuild=Rebuild(by_channel, references=(1, 2), when=_normalizes),
)


def instance_norm_forward(
    static: Static,
    needs: Needs,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
) -> Result:
    wide = _repeated(weight, x.shape[0]), _repeated(bias, x.shape[0])
    result = batch_norm_forward(static, needs, _one_sample(x), *wide, mean, var)
    return result._replace(output=unviewed(result.output.view(x.shape)))


def instance_norm_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    return _of_samples(batch_norm_backward(static, needs, lossy, exact, _one_sample(grad)), grad)


def instance_norm_piecewise(
    static: Static, needs: Needs, held: list[Held], exact: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...] | None:
    """See `batch_norm_piecewise`."""
    found = batch_norm_piecewise(static, needs, held, exact, _one_sample(grad))
    return None if found is None else _of_samples(found, grad)


def _of_samples(found: tuple[Tensor | None, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of one sample that has every sample's channels, by the samples."""
    dx, dw, db, *rest = found
    return (
        None if dx is None else dx.view(grad.shape),
        None if dw is None else dw.view(grad.shape[:2]).sum(0),
        None if db is None else db.view(grad.shape[:2]).sum(0),
        *rest,
    )


def _one_sample(x: Tensor) -> Tensor:
    return x.contiguous().view(1, x.shape[0] * x.shape[1], *x.shape[2:])


def _repeated(tensor: Tensor | None, samples: int) -> Tensor | None:
    return None if tensor is None else tensor.repeat(samples)


INSTANCE_NORM = Formula(
    "instance_norm",
    instance_norm_forward,
    instance_norm_backward,
    BATCH_NORM.keeps,
    piecewise=instance_norm_piecewise,
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
    **unknown: Any,
) -> Any:
    """`F.batch_norm`: input `(n, channels, *)`; updates the running statistics as PyTorch does."""
    if unknown or input.dim() < 2:
        return call.refuse("batch_norm has a formula only for inputs (n, channels, *)")
    if kept_anyway(call, input) or not _valid(input, training, running_mean, running_var, eps):
        return call.plain()
    static = (training, momentum, eps, layout_of(input))
    return call.apply(BATCH_NORM, static, input, weight, bias, running_mean, running_var)


def _valid(input: Tensor, training: bool, mean: Tensor | None, var: Tensor | None, eps: float) -> bool:
    """False where `F.batch_norm` raises: it then does so by itself."""
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
    **unknown: Any,
) -> Any:
    """`F.instance_norm`: input `(n, channels, *)`; running statistics become those of the samples' mean."""
    if unknown:
        return call.refuse(f"instance_norm has no formula for {sorted(unknown)}")
    wanted = any(each is not None and each.requires_grad for each in (input, weight, bias))
    if not wanted or kept_anyway(call, input):
        return call.plain()
    if not _has_instances(input, use_input_stats, running_mean, running_var):
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
    """`torch.instance_norm`."""
    return instance_norm(call, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _has_instances(input: Tensor, own: bool, mean: Tensor | None, var: Tensor | None) -> bool:
    """False where `F.instance_norm` raises: it then does so by itself."""
    if input.dim() < 3 or input.numel() == 0:
        return False
    return input[0, 0].numel() > 1 if own else mean is not None and var is not None


_INSTANCE_NORM = Route("instance_norm", "instancenorm", instance_norm)
ROUTES: Routes = {
    F.batch_norm: Route("batch_norm", "bn", batch_norm),
    F.instance_norm: _INSTANCE_NORM,
    torch.instance_norm: Route("instance_norm", "instancenorm", torch_instance_norm),
}
LAYERS: Layers = {
    nn.modules.batchnorm._BatchNorm: F.batch_norm,
    nn.modules.instancenorm._InstanceNorm: F.instance_norm,
}
