"""Cross-entropy with the linear layer that made its logits, backward in slices of rows (`tile`).

Nothing lossy is saved, and nothing as large as the logits: only that layer's input and weight, which exist
anyway, and the targets. In backward, the logits of a slice are computed again, and from them its gradient of
the input, and its share of those of the weight and the bias. Neither the probabilities nor the gradient of
the logits is ever whole.

The logits are an input of the function, but have no gradient of it, unless somebody may want to see that
gradient (`Logits.has_watchers`): then it is made whole, and the head goes backward itself. Other consumers of
the logits send their gradient through the head in any case.

The input is saved as it is, whatever the settings of the head: its rounding would be exponentiated (Rule 10).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Grads, Needs, Result, Route, Routes, Saved, Static
from mesa_tune.engine.head import Logits, is_made_by_head, logits_of
from mesa_tune.engine.tensors import cast
from mesa_tune.formulas.cross_entropy import class_axis, cross_entropy, mean_divisor, soft_counts, wide_dtype
from mesa_tune.ops.devices import on_cpu
from mesa_tune.ops.fused import by_target

FINER = 4
"""Slices of the forward for each of the backward, on the CPU."""

_IGNORED = -100
_NO_HEAD = "its logits are not the unchanged output of a linear layer that saves its input as it is"


def forward(
    static: Static, needs: Needs, logits: Tensor, target: Tensor, weight: Tensor | None, *head: Tensor | None
) -> Result:
    """`head`: input, weight and bias of the linear layer, the rows, and the probe of `Logits`."""
    reduction, ignore, smoothing, tile, _ = static
    options: Any = {"ignore_index": ignore, "reduction": reduction}
    sliceable = logits.device.type in ("cpu", "cuda") and logits.dim() == 2 and weight is None
    if sliceable and smoothing == 0 and not target.is_floating_point():
        y = _in_slices(logits, target, tile, options)
    else:
        y = F.cross_entropy(logits, target, weight, label_smoothing=smoothing, **options)
    return Result(y, exact=(target, weight, *head[:4]))


def _in_slices(logits: Tensor, target: Tensor, tile: int, options: Any) -> Tensor:
    """Return the loss, bitwise PyTorch's, without all logarithms of probabilities at once.

    PyTorch computes these row by row, and sums those of the targets as those of a single class. On CUDA the
    order in which a row is summed depends on its alignment: slices of eight rows, also when copied or cast,
    are aligned as the whole is. The whole logits are alive here, as in no slice of the backward, so on the
    CPU these slices are smaller: they need no product, which makes small ones slow. CUDA's caching allocator
    reuses the blocks of the backward's slices; smaller ones would split the block of the logits.
    """
    tile *= FINER if on_cpu(logits) else 1
    rows = max(1, -(-len(logits) // (8 * tile))) * 8
    ignore = options["ignore_index"]
    slices = zip(logits.split(rows), target.split(rows), strict=True)
    losses = [F.cross_entropy(z, t, ignore_index=ignore, reduction="none") for z, t in slices]
    single = torch.where(target == ignore, _IGNORED, 0)
    logs = torch.cat(losses).neg_().unsqueeze(1)
    return F.nll_loss(logs, single, ignore_index=_IGNORED, reduction=options["reduction"])


def backward(saved: Saved, grad: Tensor) -> Grads:
    logits: Logits = saved.static[-1]
    slices = _Slices(saved, grad)
    if logits.has_watchers():
        return slices.whole(), *(None,) * 7
    _, _, x, weight, bias, _ = saved.exact
    dx, dw, db = [
        torch.zeros_like(tensor, dtype=wide_dtype(tensor.dtype)) if need else None
        for need, tensor in zip(saved.needs[3:6], (x, weight, bias), strict=True)
    ]
    for index, part, dz in slices:
        if dx is not None:
            dx.view(-1, dx.shape[-1])[index] = (dz @ slices.weight).to(dx.dtype)
        if dw is not None:
            _add_product(dw[logits.classes], dz.t(), part)
        if db is not None:
            db[logits.classes] += dz.sum(0)
        del part, dz
    grads = zip((dx, dw, db), (x, weight, bias), strict=True)
    own = [None if each is None else cast(each, tensor.dtype) for each, tensor in grads]
    return None, None, None, *own, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` to `total`, which may have more bits."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


class _Slices:
    """The slices of a backward: rows of the head, their part of its input, and the gradient of their logits.

    `weight` and `bias` are those of the classes, as the head multiplied by them.
    """

    def __init__(self, saved: Saved, grad: Tensor) -> None:
        reduction, self.ignore, self.smoothing, self.tile, self.logits = saved.static
        target, weight, x, head_weight, bias, self.rows = saved.exact
        classes, dtype = self.logits.classes, self.logits.head.dtype
        self.x, self.dtype = x.reshape(-1, x.shape[-1]), dtype
        self.weight = cast(head_weight[classes], dtype)
        self.bias = None if bias is None else cast(bias[classes], dtype)
        self.count = len(self.x) if self.rows is None else len(self.rows)
        wide = wide_dtype(self.logits.dtype)
        self.class_weight = None if weight is None else weight.to(wide)
        self.is_soft = target.is_floating_point()
        if self.is_soft:
            axis = class_axis(target.dim())
            self.target = target.movedim(axis, -1).reshape(-1, target.shape[axis])
        else:
            self.target = target.reshape(-1)
        self.set_factor(grad.to(wide), reduction == "mean")

    def set_factor(self, grad: Tensor, mean: bool) -> None:
        """Set the factor of each row's gradient, and, of hard targets, their index."""
        self.index: Tensor | None = None
        if self.smoothing == 0 and not self.is_soft:
            self.index, self.factor, _ = by_target(self.target, self.class_weight, self.ignore, mean, grad)
        elif mean:
            self.factor = grad / mean_divisor(self.ignore, self.target, self.class_weight, self.target)
        else:
            self.factor = grad

    def __iter__(self) -> Iterator[tuple[Any, Tensor, Tensor]]:
        size = max(1, -(-self.count // self.tile))
        for first in range(0, self.count, size):
            part = slice(first, min(first + size, self.count))
            index = part if self.rows is None else self.rows[part]
            x = cast(self.x[index], self.dtype)
            yield index, x, self.gradient(x, part)

    def gradient(self, x: Tensor, part: slice) -> Tensor:
        """Return the gradient of a slice's logits, `(rows, classes)`, in the dtype of the head's output."""
        z = F.linear(x, self.weight, self.bias)
        dtype = z.dtype
        z = cast(z, self.logits.dtype)
        p = torch.softmax(z, -1, dtype=wide_dtype(z.dtype))
        del z
        if self.index is None:
            q = soft_counts((None, self.ignore, self.smoothing), p, self.target[part], self.class_weight)
            dz = p.mul_(q.sum(1, keepdim=True)).sub_(q).mul_(self.factor)
        else:
            factor = self.factor[part].unsqueeze(1)
            dz = p.mul_(factor).scatter_add_(1, self.index[part].unsqueeze(1), -factor)
        return cast(cast(dz, self.logits.dtype), dtype)

    def whole(self) -> Tensor:
        """Return the gradient of the loss's input as a whole."""
        shape, axis = self.logits.shape, class_axis(len(self.logits.shape))
        dz = self.x.new_empty(self.count, shape[axis], dtype=self.logits.dtype)
        first = 0
        for _, _, part in self:
            dz[first : first + len(part)] = part
            first += len(part)
        others = [size for dim, size in enumerate(shape) if dim != axis]
        whole: Tensor = dz.view(*others, shape[axis]).movedim(-1, axis)
        return whole


TILED_CROSS_ENTROPY = Formula(
    "tiled_cross_entropy",
    forward,
    backward,
    "nothing lossy; exact: input and weight of the layer that made the logits, targets, and class weights",
    lossless=True,
)


def tiled_cross_entropy(
    call: Call,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Route of `F.cross_entropy`: in slices with `tile`, where that is possible; else as without."""
    given = input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    if call.spec.tile == 1 or not input.requires_grad or input.numel() <= call.spec.min_elements:
        return cross_entropy(call, *given)
    reduced = size_average is not None or reduce is not None or reduction not in ("mean", "sum")
    trained = target.requires_grad or (weight is not None and weight.requires_grad)
    why = _obstacle(call, input, reduced, trained)
    logits = logits_of(input) if why is None else None
    tensors = None if logits is None else logits.head.tensors()
    if logits is not None and tensors is not None:
        static = (reduction, ignore_index, label_smoothing, call.spec.tile, logits)
        rows_and_probe = logits.rows, logits.probe
        return call.apply(TILED_CROSS_ENTROPY, static, input, target, weight, *tensors, *rows_and_probe)
    return call.untiled(why or _NO_HEAD, partial(cross_entropy, call))


def _obstacle(call: Call, input: Tensor, reduced: bool, trained: bool) -> str | None:
    """Return why a call cannot go past its logits, whatever made them; None if it can."""
    if torch.compiler.is_compiling():
        return "it is in compiled code"
    if reduced:
        return "its reduction is neither mean nor sum"
    if trained:
        return "its targets or class weights want a gradient"
    call.ask(is_made_by_head, input)
    return None


ROUTES: Routes = {F.cross_entropy: Route("cross_entropy", "loss", tiled_cross_entropy, tiles=True)}
