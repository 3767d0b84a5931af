"""y = a b, and y = β c + α a b. Kept: a if b wants a gradient, b if a does; c only by its shape.

da = g bᵀ, db = aᵀ g, each summed over the dimensions along which its operand was repeated. Each gradient is
linear in the copy of the other operand, so errors are unbiased. A grouped product, as mixtures of experts
take it, has a matrix b for each group of rows of a.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.engine.call import Call
from mesa_tune.engine.formula import (
    Formula,
    Layers,
    Needs,
    Result,
    Route,
    Routes,
    Static,
    autocast_dtype,
    cast,
    unviewed,
    wanted,
)
from mesa_tune.engine.packed import Held


def forward(static: Static, needs: Needs, a: Tensor, b: Tensor) -> Result:
    _, _, dtype = static
    y = torch.matmul(cast(a, dtype), cast(b, dtype))
    return Result(unviewed(y), lossy=((a,) if needs[1] else ()) + ((b,) if needs[0] else ()))


def backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    a_shape, b_shape, dtype = static
    grad = grad.unsqueeze(-1) if len(b_shape) == 1 else grad
    grad = grad.unsqueeze(-2) if len(a_shape) == 1 else grad
    da = db = None
    if needs[0]:
        b = cast(lossy[-1], dtype)
        da = _shaped(_product(grad, b.unsqueeze(0) if b.dim() == 1 else b.mT), a_shape, 0)
    if needs[1]:
        a = cast(lossy[0], dtype)
        a = a.unsqueeze(0) if a.dim() == 1 else a
        if len(b_shape) <= 2 and a.dim() == grad.dim():  # one product over all rows, not one a batch to sum
            a, grad = a.flatten(0, -2), grad.flatten(0, -2)
        db = _shaped(_product(a.mT, grad), b_shape, 1)
    return da, db


def piecewise(
    static: Static, needs: Needs, held: list[Held], exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...] | None:
    """The products of rows with a matrix in one pass, those of a batch of matrices some at a time."""
    a_shape, b_shape, dtype = static
    if dtype is not None or len(a_shape) < 2:
        return None
    if len(b_shape) == 2 and needs[1]:
        b = held[1].whole() if needs[0] else None
        found = held[0].linear_backward(grad, b, bias=False, transposed=True)
        return None if found is None else wanted(found, needs[:2])
    return _by_matrices(a_shape, b_shape, needs, held, grad)


def _by_matrices(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...], needs: Needs, held: list[Held], grad: Tensor
) -> tuple[Tensor | None, ...] | None:
    if len(a_shape) < 3 or a_shape[:-2] != b_shape[:-2]:
        return None
    of_a, of_b = (
        held[0].parts_of(grad.dtype) if needs[1] else None,
        held[-1].parts_of(grad.dtype) if needs[0] else None,
    )
    if of_a is None and of_b is None:
        return None
    da = grad.new_empty(a_shape) if needs[0] else None
    db = grad.new_empty(b_shape) if needs[1] else None
    if da is not None:
        for part, b in of_b or [(slice(None), held[-1].whole())]:
            torch.matmul(grad[part], b.mT, out=da[part])
    if db is not None:
        for part, a in of_a or [(slice(None), held[0].whole())]:
            torch.matmul(a.mT, grad[part], out=db[part])
    return da, db


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b; `matmul` takes longer to find out what two batches of matrices are."""
    return torch.bmm(a, b) if a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0] else a @ b


def _shaped(grad: Tensor, shape: tuple[int, ...], side: int) -> Tensor:
    """The gradient of an operand; a vector is a matrix on its side of a product."""
    if grad.shape == shape:
        return grad
    matrix = shape if len(shape) > 1 else (1, *shape) if side == 0 else (*shape, 1)
    return _summed(grad, matrix).reshape(shape)


def _summed(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    return grad if grad.shape == shape else grad.sum_to_size(shape)


GROUPED_MM: Any = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]


def grouped_forward(static: Static, needs: Needs, a: Tensor, b: Tensor, offs: Tensor) -> Result:
    y = GROUPED_MM(a, b, offs=offs)
    return Result(y, ((a,) if needs[1] else ()) + ((b,) if needs[0] else ()), (offs,))


def grouped_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    (transposed,), (offs,) = static, exact
    grad = grad.contiguous()
    da = GROUPED_MM(grad, lossy[-1].mT, offs=offs) if needs[0] else None
    db = None
    if needs[1]:
        a = lossy[0]
        product = GROUPED_MM(*((grad.mT, a) if transposed else (a.mT, grad)), offs=offs)
        db = product.mT if transposed else product
    return da, db, None


GROUPED = Formula(
    "grouped_mm", grouped_forward, grouped_backward, "each operand whose partner wants a gradient"
)


class MatMul(nn.Module):
    """A product as a layer of its own, as Mesa's models write it: `MatMul()(q, k)` is `q @ k`."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        return torch.matmul(input, other)


MATMUL = Formula(
    "matmul", forward, backward, "each operand whose partner wants a gradient", piecewise=piecewise
)


def plus_forward(static: Static, needs: Needs, a: Tensor, b: Tensor, c: Tensor) -> Result:
    _, _, _, beta, alpha, dtype = static
    add = torch.addmm if a.dim() == 2 else torch.baddbmm
    y = add(cast(c, dtype), cast(a, dtype), cast(b, dtype), beta=beta, alpha=alpha)
    return Result(y, lossy=((a,) if needs[1] else ()) + ((b,) if needs[0] else ()))


def plus_backward(
    static: Static, needs: Needs, lossy: list[Tensor], exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    a_shape, b_shape, c_shape, beta, alpha, dtype = static
    product = grad if alpha == 1 else grad * alpha
    da, db = backward((a_shape, b_shape, dtype), needs, lossy, exact, product)
    dc = _summed(grad if beta == 1 else grad * beta, c_shape) if needs[2] else None
    return da, db, dc


def plus_piecewise(
    static: Static, needs: Needs, held: list[Held], exact: Any, grad: Tensor
) -> tuple[Tensor | None, ...] | None:
    """See `piecewise`."""
    a_shape, b_shape, c_shape, beta, alpha, dtype = static
    found = piecewise((a_shape, b_shape, dtype), needs, held, exact, grad if alpha == 1 else grad * alpha)
    if found is None:
        return None
    return *found, _summed(grad if beta == 1 else grad * beta, c_shape) if needs[2] else None


MATMUL_PLUS = Formula("matmul_plus", plus_forward, plus_backward, MATMUL.keeps, piecewise=plus_piecewise)


def matmul(call: Call, input: Tensor, other: Tensor, **unknown: Any) -> Any:
    """`torch.matmul` and `@`: vectors, matrices and batches of them, repeated where needed."""
    if unknown:
        return call.refuse(f"matmul has no formula for {sorted(unknown)}")
    static = (tuple(input.shape), tuple(other.shape), autocast_dtype(input))
    return call.apply(MATMUL, static, input, other)


def product(call: Call, input: Tensor, mat2: Tensor, **unknown: Any) -> Any:
    """`torch.bmm` and `torch.mm`: `matmul` without repetition."""
    if unknown or input.dim() != mat2.dim():
        return call.refuse(f"a matrix product has no formula for {sorted(unknown)}")
    return matmul(call, input, mat2)


def addmm(
    call: Call,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    **unknown: Any,
) -> Any:
    """`torch.addmm`, as transformers' `Conv1D` calls it: input `(out,)` or `(n, out)`, mat1 `(n, in)`."""
    return _plus(call, input, mat1, mat2, beta, alpha, unknown)


def baddbmm(
    call: Call,
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    **unknown: Any,
) -> Any:
    """`torch.baddbmm`: batches of matrices, and what is added to their products."""
    return _plus(call, input, batch1, batch2, beta, alpha, unknown)


def _plus(call: Call, c: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float, unknown: Any) -> Any:
    if unknown:
        return call.refuse(f"a matrix product has no formula for {sorted(unknown)}")
    static = (tuple(a.shape), tuple(b.shape), tuple(c.shape), beta, alpha, autocast_dtype(a))
    return call.apply(MATMUL_PLUS, static, a, b, c)


def grouped_mm(call: Call, self: Tensor, mat2: Tensor, offs: Tensor | None = None, **more: Any) -> Any:
    """`torch._grouped_mm` of rows `(n, in)`, sorted by expert, and matrices `(experts, in, out)`."""
    unknown = {name: value for name, value in more.items() if value is not None}
    if offs is None or self.dim() != 2 or mat2.dim() != 3 or unknown:
        return call.refuse("grouped_mm has a formula only for rows in groups by `offs`")
    transposed = mat2.stride(-2) == 1  # the weight's gradient is laid out as the weight is
    return call.apply(GROUPED, (transposed,), self, mat2, offs)


_MATMUL = Route("matmul", "matmul", matmul)
_BMM = Route("bmm", "matmul", product)
_MM = Route("mm", "matmul", product)
_ADDMM = Route("addmm", "fc", addmm)
_BADDBMM = Route("baddbmm", "matmul", baddbmm)
ROUTES: Routes = {
    torch.matmul: _MATMUL,
    torch.linalg.matmul: _MATMUL,
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    torch.bmm: _BMM,
    Tensor.bmm: _BMM,
    torch.mm: _MM,
    Tensor.mm: _MM,
    torch.addmm: _ADDMM,
    Tensor.addmm: _ADDMM,
    torch.baddbmm: _BADDBMM,
    Tensor.baddbmm: _BADDBMM,
    GROUPED_MM: Route("grouped_mm", "fc", grouped_mm),
}
LAYERS: Layers = {MatMul: torch.matmul}
