"""y = a b, and y = β c + α a b. Saved: a if b wants a gradient, b if a does; c only by its shape.

da = g bᵀ, db = aᵀ g, each summed over the dimensions along which its operand was repeated. Each gradient is
linear in the copy of the other operand, so errors are unbiased. A grouped product, as mixtures of experts
compute it, has a matrix b for each group of rows of a.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.engine.call import Call, autocast_dtype
from mesa_tune.engine.formula import Formula, Grads, Layers, Needs, Result, Route, Routes, Saved, Static
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.engine.tensors import cast, gathered, like, wanted
from mesa_tune.formulas.linear import fused_backward, last_axis

Shape = tuple[int, ...]


def forward(static: Static, needs: Needs, a: Tensor, b: Tensor) -> Result:
    dtype = static[-1]
    y = torch.matmul(cast(a, dtype), cast(b, dtype))
    return Result(y, ((a,) if needs[1] else ()) + ((b,) if needs[0] else ()))


def backward(saved: Saved, grad: Tensor) -> Grads:
    """In one pass for rows times a matrix; large batches of matrices in slices; else of whole tensors."""
    (a_shape, b_shape, dtype), needs, lossy, _ = saved
    grads: Grads | None = None
    if len(a_shape) > 1 and len(b_shape) == 2 and needs[1]:
        grads = fused_backward(lossy[0], grad, lossy[1] if needs[0] else None, transposed=True)
    elif dtype is None and len(a_shape) > 2 and a_shape[:-2] == b_shape[:-2]:
        grads = _by_matrices(saved, grad)
    if grads is not None:
        return wanted(grads, needs)
    grad = grad.unsqueeze(-1) if len(b_shape) == 1 else grad
    grad = grad.unsqueeze(-2) if len(a_shape) == 1 else grad
    da = db = None
    if needs[0]:
        b = lossy[-1].whole(dtype)
        da = _shaped(_product(grad, b.unsqueeze(0) if b.dim() == 1 else b.mT), a_shape, (1, *a_shape))
        del b
    if needs[1]:
        db = _gradient_of_second(saved.static, lossy[0], grad)
    return da, db


def _gradient_of_second(static: Static, first: SavedTensor, grad: Tensor) -> Tensor:
    (a_shape, b_shape, dtype) = static
    sampled = first.sampled() if len(a_shape) > 1 and len(b_shape) == 2 else None
    if sampled is not None:
        indices, rows = sampled
        return cast(rows, dtype).mT @ grad.flatten(0, -2)[indices]
    a = first.whole(dtype)
    a = a.unsqueeze(0) if a.dim() == 1 else a
    if len(b_shape) <= 2 and a.dim() == grad.dim():  # one product over all rows, not one a batch to sum
        a, grad = a.flatten(0, -2), grad.flatten(0, -2)
    return _shaped(_product(a.mT, grad), b_shape, (*b_shape, 1))


def _by_matrices(saved: Saved, grad: Tensor) -> Grads | None:
    """Return the gradients of two batches of matrices; None where both tensors can only be decoded whole."""
    (a_shape, b_shape, _), needs, lossy, _ = saved
    slices = [tensor.slices(grad.dtype) for tensor in lossy]
    if slices.count(None) == len(slices):
        return None
    da = grad.new_empty(a_shape) if needs[0] else None
    db = grad.new_empty(b_shape) if needs[1] else None
    if da is not None:
        for part, b in slices[-1] or [(slice(None), lossy[-1].whole())]:
            torch.matmul(grad[part], b.mT, out=da[part])
    if db is not None:
        for part, a in slices[0] or [(slice(None), lossy[0].whole())]:
            torch.matmul(a.mT, grad[part], out=db[part])
    return da, db


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b; `matmul` takes longer to find out what two batches of matrices are."""
    return torch.bmm(a, b) if a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0] else a @ b


def _shaped(grad: Tensor, shape: Shape, matrix: Shape) -> Tensor:
    """Return the gradient of an operand of this shape; a vector was multiplied as a `matrix`."""
    if grad.shape == shape:
        return grad
    return grad.sum_to_size(matrix if len(shape) == 1 else shape).reshape(shape)


MATMUL = Formula(
    "matmul",
    forward,
    backward,
    "each operand whose partner wants a gradient",
    views=True,
    row_axis=last_axis,
)


class MatMul(nn.Module):
    """A product as a layer of its own, as Mesa's models write it: `MatMul()(q, k)` is `q @ k`."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        return torch.matmul(input, other)


def plus_forward(static: Static, needs: Needs, a: Tensor, b: Tensor, c: Tensor) -> Result:
    *_, beta, alpha, dtype = static
    add = torch.addmm if a.dim() == 2 else torch.baddbmm
    y = add(cast(c, dtype), cast(a, dtype), cast(b, dtype), beta=beta, alpha=alpha)
    return Result(y, ((a,) if needs[1] else ()) + ((b,) if needs[0] else ()))


def plus_backward(saved: Saved, grad: Tensor) -> Grads:
    (a_shape, b_shape, c, beta, alpha, dtype), needs, lossy, exact = saved
    product = Saved((a_shape, b_shape, dtype), needs[:2], lossy, exact)
    da, db = backward(product, grad if alpha == 1 else grad * alpha)
    return da, db, gathered(grad if beta == 1 else grad * beta, c) if needs[2] else None


MATMUL_PLUS = Formula("matmul_plus", plus_forward, plus_backward, MATMUL.saves, row_axis=last_axis)

GROUPED_MM: Any = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]


def grouped_forward(static: Static, needs: Needs, a: Tensor, b: Tensor, offs: Tensor) -> Result:
    y = GROUPED_MM(a, b, offs=offs)
    return Result(y, ((a,) if needs[1] else ()) + ((b,) if needs[0] else ()), (offs,))


def grouped_backward(saved: Saved, grad: Tensor) -> Grads:
    (transposed,), needs, lossy, (offs,) = saved
    grad = grad.contiguous()
    da = db = None
    if needs[0]:
        da = GROUPED_MM(grad, lossy[-1].whole().mT, offs=offs)
    if needs[1]:
        a = lossy[0].whole()
        db = GROUPED_MM(grad.mT, a, offs=offs).mT if transposed else GROUPED_MM(a.mT, grad, offs=offs)
    return da, db, None


GROUPED = Formula("grouped_mm", grouped_forward, grouped_backward, MATMUL.saves, row_axis=last_axis)


def matmul(call: Call, input: Tensor, other: Tensor) -> Any:
    """Route of `torch.matmul` and `@`: vectors, matrices and batches of them, repeated where needed."""
    static = (tuple(input.shape), tuple(other.shape), autocast_dtype(input))
    return call.apply(MATMUL, static, input, other)


def product(call: Call, input: Tensor, mat2: Tensor) -> Any:
    """Route of `torch.bmm` and `torch.mm`: `matmul` without repetition."""
    return matmul(call, input, mat2) if input.dim() == mat2.dim() else call.plain()


def addmm(call: Call, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """Route of `torch.addmm` (transformers' `Conv1D`): input `(out,)` or `(n, out)`, mat1 `(n, in)`."""
    static = (tuple(mat1.shape), tuple(mat2.shape), like(input), beta, alpha, autocast_dtype(mat1))
    return call.apply(MATMUL_PLUS, static, mat1, mat2, input)


def baddbmm(
    call: Call, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    """Route of `torch.baddbmm`: batches of matrices, and what is added to their products."""
    return addmm(call, input, batch1, batch2, beta=beta, alpha=alpha)


def grouped_mm(
    call: Call,
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Route of `torch._grouped_mm` of rows `(n, in)`, sorted by expert, and matrices `(experts, in, out)`."""
    fits = self.dim() == 2 and mat2.dim() == 3 and bias is None and out_dtype is None
    if offs is None or not fits:
        return call.refuse("grouped_mm has a formula only for rows in groups by `offs`")
    transposed = mat2.stride(-2) == 1  # the weight's gradient is laid out as the weight is
    return call.apply(GROUPED, (transposed,), self, mat2, offs)


ROUTES: Routes = {
    **Route("matmul", "matmul", matmul).spelled("matmul", owners=(torch, torch.linalg, Tensor)),
    Tensor.__matmul__: Route("matmul", "matmul", matmul),
    **Route("bmm", "matmul", product).spelled("bmm"),
    **Route("mm", "matmul", product).spelled("mm"),
    **Route("addmm", "fc", addmm).spelled("addmm"),
    **Route("baddbmm", "matmul", baddbmm).spelled("baddbmm"),
    GROUPED_MM: Route("grouped_mm", "fc", grouped_mm),
}
LAYERS: Layers = {MatMul: torch.matmul}
