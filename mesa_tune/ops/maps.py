"""Maps: elementwise functions of a tensor, computed by the kernel that encodes their result.

Nobody else needs the result, and to write it to memory would cost more than the arithmetic. A kernel computes
each piece in the first-level cache, or in registers, and encodes it there. These are the same functions in
plain PyTorch, for devices without such a kernel. What is hard is that kernel and reference must give the same
bytes: every operation is rounded to float32, in the same order (no fused multiply-add), and the result to the
dtype of the tensor.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mesa_tune import ops

KINDS = {"normalize": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4, "exp": 5, "definite": 6}
"""The number of each map in the kernels, by name."""

_ON_CUDA = ops.native("cuda")  # its kernels compute maps while encoding, too


class Deferred(NamedTuple):
    """A tensor to save, computed while it is encoded: map `kind` of `source`; `make` computes it otherwise.

    `normalize`: (source - mean) * rstd, where each run of `inner` neighbours has its own mean (None: 0) and
    rstd. In 16 bits they must be those of the run itself: its mean, which is rounded there, is made again.
    `definite`: the source with 0 for NaN; `make` returns the source itself, which other layers save, too. The
    other maps are the derivatives of the functions that they are named after.
    """

    source: Tensor
    kind: str
    make: Callable[[], Tensor]
    mean: Tensor | None = None
    rstd: Tensor | None = None
    inner: int = 1

    @property
    def is_dense(self) -> bool:
        """Whether a kernel can compute it while encoding."""
        source = self.source
        if not source.is_cpu and not (_ON_CUDA and source.is_cuda):
            return False
        dense = source.dtype in ops.DTYPES and source.is_contiguous() and source.numel() > 0
        return dense and self._statistics_fit()

    def _statistics_fit(self) -> bool:
        """Return whether they have 32 bits, or are those of rows in 16 bits, as PyTorch gives on the CPU."""
        source, _, _, mean, rstd, inner = self
        if rstd is None or rstd.dtype is torch.float32:
            return mean is None or mean.dtype is torch.float32
        return source.is_cpu and rstd.dtype in ops.DTYPES and rstd.numel() * inner == source.numel()

    def if_dense(self) -> "Tensor | Deferred":
        """Return what to save: this if a kernel can compute it while encoding, else the computed tensor."""
        return self if self.is_dense else self.make()

    def made(self) -> Tensor:
        """Return the tensor as it is encoded."""
        return without_nan(self.source) if self.kind == "definite" else self.make()


def definite(x: Tensor) -> Tensor | Deferred:
    """Return what to save of `x`, some of whose rows may be NaN without an effect on the others' gradients.

    A softmax of only -Inf is such a row. Encoded as NaN, it would make all elements that share its group NaN.
    """
    return x if torch.compiler.is_compiling() else Deferred(x, "definite", lambda: x)


def without_nan(x: Tensor) -> Tensor:
    """Return `x` with 0 for NaN."""
    return torch.where(x == x, x, 0)  # noqa: PLR0124 (NaN alone is not equal to itself)


def apply(x: Tensor, kind: int, mean: Tensor | None, rstd: Tensor | None, inner: int) -> Tensor:
    """Return the map numbered `kind` of `x`, float32 and contiguous."""
    values = x.detach().to(torch.float32).contiguous()
    if kind != KINDS["normalize"]:
        return _CURVES[kind](values)
    assert rstd is not None
    flat = values.view(-1, rstd.numel(), inner)
    if mean is not None and rstd.dtype != torch.float32:
        mean = flat.double().mean(-1).float()
    centered = flat if mean is None else flat - mean.reshape(-1, 1)
    return (centered * rstd.float().reshape(-1, 1)).view(x.shape)


def exponential(x: Tensor) -> Tensor:
    """Return exp(x) for x up to 88, 0 below -87: 2**n times a polynomial (Cephes' coefficients)."""
    most = torch.where(x > -87.0, x, -87.0)
    shifted = most * 1.44269504088896341 + 12582912.0  # 1.5 * 2**23: the integer comes to lie in the low bits
    n = shifted - 12582912.0
    r = (most - n * 0.693359375) - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    for coefficient in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + coefficient
    p = (p * (r * r) + r) + 1.0
    power = (shifted.view(torch.int32) - 0x4B400000 + 127) << 23
    value = p * power.view(torch.float32)
    return torch.where(x > -87.0, value, torch.where(torch.isnan(x), x, 0.0))


def gaussian(z: Tensor) -> Tensor:
    """Return exp(-z² / 2) for 0 <= z <= 13: a power of two, by a polynomial of the exponent's fraction."""
    t = z * z * -0.721347520
    shifted = t + 12582912.0  # 1.5 * 2**23: the integer comes to lie in the low bits
    r = t - (shifted - 12582912.0)
    p = r * 1.32768e-3 + 9.67556e-3
    for coefficient in (5.550712e-2, 2.402212e-1, 6.9314697e-1, 1.0):
        p = p * r + coefficient
    power = (shifted.view(torch.int32) - 0x4B400000 + 127) << 23
    return p * power.view(torch.float32)


_GELU = [1.52635507e-4, -1.2746394e-3, 6.39234946e-3, -2.22468854e-2, 5.95140123e-2, -1.31784373e-1]
_GELU += [2.49756301e-1, -7.97865387e-1, 4.9999974e-1]


def gelu_derivative(x: Tensor) -> Tensor:
    """Return d/dx of x Φ(x): for z = |x| it is 1 - q at z and q at -z.

    q / exp(-z² / 2) is nearly a polynomial (a minimax fit with an error of 3e-7). Beyond 13, the derivative
    is 1 or 0 in float32.
    """
    size = x.abs()
    z = torch.where(size > 13.0, 13.0, size)
    p = torch.full_like(z, -8.120477e-6)
    for coefficient in _GELU:
        p = p * z + coefficient
    q = p * gaussian(z)
    return torch.where(x < 0.0, q, 1.0 - q)


def gelu_tanh_derivative(x: Tensor) -> Tensor:
    """Return d/dx of GELU by tanh: with s = (1 + tanh u) / 2 and u = √(2/π) (x + 0.044715 x³)."""
    square = x * x
    inner = x * (square * 0.0356774081 + 0.797884561)
    inner = torch.where(inner < 40.0, inner, 40.0)
    inner = torch.where(inner > -40.0, inner, -40.0)
    s = 1.0 / (exponential(inner * -2.0) + 1.0)
    return s + x * (s * (1.0 - s)) * 2.0 * (square * 0.107032224 + 0.797884561)


def silu_derivative(x: Tensor) -> Tensor:
    """Return d/dx of x σ(x)."""
    s = 1.0 / (exponential(-torch.where(x > -80.0, x, -80.0)) + 1.0)
    return s * (x * (1.0 - s) + 1.0)


def exp_derivative(x: Tensor) -> Tensor:
    """Return exp(x), the probability whose logarithm is x; beyond 88 as at 88, and 0 for NaN."""
    return exponential(torch.where(x > 88.0, 88.0, torch.where(torch.isnan(x), -88.0, x)))


_CURVES: dict[int, Callable[[Tensor], Tensor]] = {
    KINDS["gelu"]: gelu_derivative,
    KINDS["gelu_tanh"]: gelu_tanh_derivative,
    KINDS["silu"]: silu_derivative,
    KINDS["exp"]: exp_derivative,
    KINDS["definite"]: without_nan,
}
