"""Lengths of vectors, and vectors over their lengths: `vector_norm`, `normalize`, `cosine_similarity`.

Saved: unit vectors, packed, and lengths, exact (Rule 7). PyTorch saves x and divides by its length in
backward; a rounded x has no bound there: a row may be a thousand times shorter than the one that shares its
group, or zero.

* `vector_norm`: n = |x|. Saved: u = x / n, 0 where n = 0; dx = g u. By order 1 its signs; dx = g sign(x).
* `normalize`: y = x / max(n, ε). Saved: y, as what follows it does; dx = (g − y Σ(g y)) / n, g / ε if n < ε.
* `cosine_similarity`: y = Σ u v with u = a / max(|a|, ε), v likewise. Saved: v − y u, and u − y v, which are
  small where a and b are nearly parallel; da = g (v − y u) / |a|.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune import ops
from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import Formula, Grads, Layers, Needs, Result, Route, Routes, Saved, Static
from mesa_tune.engine.tensors import gathered, like
from mesa_tune.formulas.amax import restored, sorted_dims


def forward(static: Static, needs: Needs, x: Tensor) -> Result:
    dims, keepdim, _, _ = static
    n = torch.linalg.vector_norm(x, 2, dims, keepdim)
    length = restored(n, dims, keepdim)
    unit = torch.where(length == 0, 0, x / length).to(x.dtype)
    return Result(n, (unit,), (ops.pack_bits(length == 0),))


def backward(saved: Saved, grad: Tensor) -> Grads:
    (dims, keepdim, _, dtype), _, (unit,), (zero,) = saved
    grad = restored(grad, dims, keepdim)
    return ((unit.whole() * grad.masked_fill(ops.unpack_bits(zero, grad.shape), 0)).to(dtype),)


VECTOR_NORM = Formula(
    "vector_norm", forward, backward, "the vectors over their lengths; exact: which are zero"
)


def sum_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    dims, keepdim, _, _ = static
    y = torch.linalg.vector_norm(x, 1, dims, keepdim)
    return Result(y, exact=(ops.pack_bits(x < 0), ops.pack_bits(x > 0)))


def sum_backward(saved: Saved, grad: Tensor) -> Grads:
    dims, keepdim, shape, dtype = saved.static
    below, above = (ops.unpack_bits(bits, shape).to(grad.dtype) for bits in saved.exact)
    return (above.sub_(below).mul_(restored(grad, dims, keepdim)).to(dtype),)


SUM_NORM = Formula(
    "sum_norm", sum_forward, sum_backward, "exact: the sign, two bits per element", lossless=True
)


def normalize_forward(static: Static, needs: Needs, x: Tensor) -> Result:
    dim, eps = static
    n = x.norm(2.0, dim, keepdim=True)
    length = n.clamp_min(eps)
    y = x / length.expand_as(x)
    return Result(y, (y,), (length, ops.pack_bits(n < eps)))


def normalize_backward(saved: Saved, grad: Tensor) -> Grads:
    (dim, _), _, lossy, (length, short) = saved
    y = lossy[0].whole()
    along = (grad * y).sum(dim, keepdim=True).masked_fill_(ops.unpack_bits(short, length.shape), 0)
    return (torch.addcmul(grad, y, along, value=-1).div_(length),)


NORMALIZE = Formula("normalize", normalize_forward, normalize_backward, "the output; exact: the lengths")


def cosine_forward(static: Static, needs: Needs, a: Tensor, b: Tensor) -> Result:
    dim, eps, *operands = static
    y = torch.cosine_similarity(a, b, dim, eps)
    vectors = torch.broadcast_tensors(a, b)
    norms = [torch.linalg.vector_norm(x, 2, dim, keepdim=True) for x in vectors]
    lengths = [n.clamp_min(eps) for n in norms]
    units = [x / length for x, length in zip(vectors, lengths, strict=True)]
    lossy, exact = [], []
    for index, (shape, dtype) in enumerate(operands):
        if needs[index]:
            n, length = norms[index], lengths[index]
            # In PyTorch the gradient passes by a length below eps as if it were used; that of zero is zero.
            ratio = torch.where(n == 0, 0, length / n)
            across = torch.addcmul(units[1 - index], units[index], y.unsqueeze(dim) * ratio, value=-1)
            lossy.append(_folded(across.to(dtype), dim, shape))
            exact.append(length)
    return Result(y, tuple(lossy), tuple(exact))


def _folded(across: Tensor, dim: int, shape: tuple[int, ...]) -> Tensor:
    """Return the sum along `dim` if the operand, of this shape, is repeated there: mostly nothing is left."""
    index = dim if dim < 0 else dim - across.dim()
    size = shape[index] if -index <= len(shape) else 1
    return across.sum(dim, keepdim=True) if size < across.shape[dim] else across


def cosine_backward(saved: Saved, grad: Tensor) -> Grads:
    (dim, _, *operands), needs, lossy, lengths = saved
    grads: list[Tensor | None] = [None, None]
    indices = [index for index, need in enumerate(needs) if need]
    for index, across, length in zip(indices, lossy, lengths, strict=True):
        grads[index] = gathered(across.whole() * (grad.unsqueeze(dim) / length), operands[index])
    return tuple(grads)


COSINE = Formula(
    "cosine_similarity",
    cosine_forward,
    cosine_backward,
    "of each operand over its length what is across the other",
)


_ORDERS: dict[float, Formula] = {1: SUM_NORM, 2: VECTOR_NORM}


def vector_norm(
    call: Call,
    x: Tensor,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    out: Any = None,
) -> Any:
    """Route of `torch.linalg.vector_norm` and whatever comes to the same; orders 1 and 2."""
    formula = _ORDERS.get(ord) if isinstance(ord, (int, float)) else None
    dims = sorted_dims(x, dim) if dtype is out is None else None
    if formula is None or not dims or not call.gains_on(x):
        return call.plain()
    return call.apply(formula, (dims, keepdim, tuple(x.shape), x.dtype), x)


def norm(
    call: Call,
    input: Tensor,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    """Route of `torch.norm` and the method: `fro` is order 2 of all dimensions that are named."""
    order = 2 if p is None or p == "fro" else p
    return vector_norm(call, input, order, dim, keepdim, dtype=dtype, out=out)


def linalg_norm(
    call: Call,
    A: Tensor,  # noqa: N803 (PyTorch's name)
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    """Route of `torch.linalg.norm` of vectors."""
    vectors = ord is None or isinstance(dim, int) or (A.dim() == 1 and dim is None)
    if not vectors:
        return call.plain()
    return vector_norm(call, A, 2 if ord is None else ord, dim, keepdim, dtype=dtype, out=out)


def normalize(
    call: Call, input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Any:
    """Route of `F.normalize` by lengths; by other norms its body is served call by call."""
    if out is not None or not isinstance(dim, int) or call.is_static(input) or not call.gains(input):
        return call.plain()
    return call.apply(NORMALIZE, (dim, eps), input) if p == 2 else call.open()


def cosine_similarity(call: Call, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Any:
    """Route of `F.cosine_similarity`, of floating-point tensors that broadcast."""
    if x1.dtype != x2.dtype or not call.gains(x1, x2):
        return call.plain()
    return call.apply(COSINE, (dim, eps, like(x1), like(x2)), x1, x2)


ROUTES: Routes = {
    torch.linalg.vector_norm: Route("vector_norm", "reduction", vector_norm),
    torch.linalg.norm: Route("norm", "reduction", linalg_norm),
    **Route("norm", "reduction", norm).spelled("norm"),
    F.normalize: Route("normalize", "reduction", normalize),
    F.cosine_similarity: Route("cosine_similarity", "reduction", cosine_similarity),
}
LAYERS: Layers = {nn.CosineSimilarity: F.cosine_similarity}
