"""What kernels are tried on: those of CUDA on a GPU and on the host, and those of the CPU."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesa_tune.ops import DTYPES, reference
from mesa_tune.ops.maps import KINDS
from mesa_tune.ops.reference.windows import Windows

SPARSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int16, torch.int32)
Sizes = tuple[int, int, int, int]  # bits, levels, group_size, quant_groups


def on(device: str, *tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors on a device."""
    return [None if each is None else each.to(device) for each in tensors]


class Case(NamedTuple):
    """A tensor, its settings, and the seed; None rounds to the nearest level."""

    x: Tensor
    sizes: Sizes
    seed: int | None


class Mapped(NamedTuple):
    """A tensor, its map and that map's statistics, its settings, and the seed."""

    x: Tensor
    kind: str
    mean: Tensor | None
    rstd: Tensor | None
    inner: int
    sizes: tuple[int, int, int]  # bits, levels, group_size
    seed: int | None

    def arguments(self, device: str = "cpu") -> tuple[Any, ...]:
        """What `quantize_map` takes after x."""
        mean, rstd, seed = on(device, self.mean, self.rstd, torch.tensor([self.seed or 0]))
        return KINDS[self.kind], mean, rstd, self.inner, *self.sizes, self.seed is not None, seed


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_gaps(x: Tensor, share: float, seed: int = 0) -> Tensor:
    """x with NaN, Inf and -Inf in about so many of its elements."""
    generator = torch.Generator().manual_seed(seed)
    bad = torch.tensor([math.nan, -math.nan, math.inf, -math.inf]).to(x.dtype)
    bad = bad[torch.randint(len(bad), x.shape, generator=generator)]
    return torch.where(torch.rand(x.shape, generator=generator) < share, bad, x)


def equal(one: Tensor, two: Tensor) -> bool:
    """Return whether the numbers are equal, NaN to NaN and 0 to -0."""
    return torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))


def packed(x: Tensor, sizes: tuple[int, ...], seed: int = 1) -> tuple[Tensor, Tensor]:
    """The packed form of x, with ends if x has 16 bits."""
    quantize = reference.quantize if x.dtype == torch.float32 else reference.quantize_ends
    bits, levels, group_size = sizes[:3]
    return quantize(x, bits, levels, group_size, 0, True, torch.tensor([seed]))


def one_pass(dtype: torch.dtype) -> Iterator[Case]:
    """Every group size that takes one pass, and its neighbours; a partial group at the end."""
    for bits, group_size in itertools.product(range(1, 9), (32, 64, 128, 256, 512, 1024, 2048, 192)):
        x = randn(3 * group_size + 17, seed=bits).to(dtype)
        nearest = (bits + group_size.bit_length()) % 2 == 0
        levels = max(2, 2**bits - 1) if nearest else 2**bits
        yield Case(x, (bits, levels, group_size, 0), None if nearest else bits - 4)
    for bits in (1, 4, 8):  # more threads than two blocks have
        yield Case(randn(700 * 64 + 9).to(dtype), (bits, 2**bits, 64, 0), 5)


def layouts(dtype: torch.dtype) -> Iterator[Case]:
    """Strides, and groups of all kinds and sizes, larger than what a warp measures, too."""
    x = randn(2, 6, 5, 41).to(dtype)
    tensors = (x, x.to(memory_format=torch.channels_last), x[..., ::3], x[:1, :, :1].expand(2, 6, 3, 41))
    for tensor, sizes in itertools.product(tensors, ((256, 0), (7, 0), (5000, 0), (0, 3), (0, 1))):
        yield Case(tensor, (3, 7, *sizes), 2**40 + 1)
    yield Case(randn(1001).to(dtype)[1:], (4, 16, 64, 0), 1)  # no 16-byte accesses at this address
    for empty in (torch.empty(0, dtype=dtype), torch.empty(0, 6, dtype=dtype)):
        yield Case(empty, (4, 16, 256, 0), 1)
    yield Case(torch.empty(0, 6, dtype=dtype), (4, 16, 0, 3), 1)


def extremes(dtype: torch.dtype) -> Iterator[Case]:
    """Ranges at the ends of what numbers can be, and beyond."""
    largest = torch.finfo(dtype).max
    groups = [
        *([largest, -largest, 1.0, 0.0], [largest * 0.75, -largest, 3e-39, -0.0], [1e-45, 0.0, 3e-45, 1e-38]),
        *([-0.0, 0.0, -0.0, 0.0], [1.0, 1.0000001, 1.0, 1.0], [math.nan, 1.0, 2.0, 3.0]),
        *([-math.nan, -1.0, 2.0, 3.0], [math.inf, 1.0, 2.0, 3.0], [-math.inf, math.inf, 2.0, 3.0]),
    ]
    x = torch.tensor(groups).repeat(1, 16).to(dtype)
    for bits, group_size in itertools.product((1, 4, 8), (64, 60)):
        yield Case(x, (bits, 2**bits, group_size, 0), bits)


def gaps(dtype: torch.dtype) -> Iterator[Case]:
    """NaN and Inf in groups of all kinds, of several pieces, too, beside groups without."""
    for number, group_size in enumerate((32, 64, 128, 256, 512, 1024, 2048, 192, 5000)):
        x = with_gaps(randn(4 * group_size + 17, seed=number).to(dtype), 0.5 / group_size, seed=number)
        several = ((1, 2), (2, 3), (3, 6)) if number % 2 else ((4, 16), (5, 17), (8, 256))
        for bits, levels in several:
            yield Case(x, (bits, levels, group_size, 0), None if bits == 3 else bits)
    x = with_gaps(randn(2, 6, 37, 41).to(dtype), 0.001)
    for tensor, groups in itertools.product((x, x.to(memory_format=torch.channels_last)), (2, 3)):
        yield Case(tensor, (3, 7, 256, groups), 1)
    whole = torch.full((4, 64), torch.finfo(dtype).max).to(dtype)
    whole[1], whole[2, ::2], whole[:, 5] = 0, -whole[2, ::2], math.inf
    whole[3] = -math.inf
    yield Case(whole, (4, 16, 64, 0), 1)
    yield Case(whole, (4, 16, 60, 0), 1)


def ends(dtype: torch.dtype) -> Iterator[Case]:
    """What ranges may be in 16 bits: of equal numbers, wide, with gaps, empty."""
    largest = torch.finfo(dtype).max
    for bits in range(1, 9):
        x = randn(64, 64, seed=bits).to(dtype)
        x[0], x[1], x[2], x[3] = 0.0, -3.0, -largest, math.nan
        x[4, :32], x[4, 32:] = -largest, largest
        x[5] = torch.finfo(dtype).tiny * x[5]
        x[8::2] = with_gaps(x[8::2], 0.1, bits)
        x[6, 1:], x[7, :-1] = math.inf, -math.inf
        some = sorted({2**bits, max(2, 2**bits - 1), min(2**bits, 2 + 2**bits // 3)})
        for number, levels in enumerate(some, start=bits):
            coarse = Case(x[:, :50], (bits, levels, 7, 0), None)
            yield Case(x, (bits, levels, 64, 0), bits - 4) if number % 2 else coarse
        yield Case(x, (bits, 2**bits, 0, 4), 3)
        yield Case(x[:0], (bits, 2**bits, 64, 0), 3)


CASES = (one_pass, layouts, extremes, gaps, ends)
"""Cases of quantizing and decoding, by dtype."""


def rows_of_zeros(dtype: torch.dtype) -> Iterator[Tensor]:
    """Rows of zeros of either sign among others, of all layouts and widths."""
    for width in (1, 7, 32, 64, 65, 300):
        x = randn(3, 11, width).to(dtype)
        x[0, 1::2], x[1, 3:], x[2] = 0.0, -0.0, 0.0
        x[1, 5, width // 2], x[1, 9, -1], x[2, 10, 0] = math.nan, torch.finfo(dtype).tiny, math.inf
        yield from (x, x.transpose(0, 1), x.transpose(1, 2), x[..., ::2], x[1, 9], x[:0])


def levels() -> Iterator[tuple[Tensor, int, list[float], list[float]]]:
    """Elements, the number of a map, boundaries and values; some elements are not finite."""
    for count, kind, dtype in itertools.product((2, 5, 16), (None, "gelu", "silu"), DTYPES):
        number = 0 if kind is None else KINDS[kind]
        boundaries = torch.linspace(-0.9, 1.1, count + 1)[1:-1].tolist()
        values = torch.linspace(-1, 1.2, count).tolist()
        for numel in (0, 9, 1003):
            x = 3 * randn(numel, seed=numel).to(dtype)
            yield x, number, boundaries, values
        x[17] = math.nan if kind is None else math.inf
        yield x, number, boundaries, values
    yield randn(2**15 + 5), 0, [-0.5, 0.5], [-1.0, 0.0, 1.0]  # more threads than two blocks have


def positions() -> Iterator[tuple[Tensor, int, int, int]]:
    """Bitmaps, their bits, how many are set, and low bits."""
    for number, numel in enumerate((0, 1, 33, 1024, 70_001)):
        for place, share in enumerate((0.0, 0.02, 0.25, 1.0)):
            mask = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < share
            yield reference.pack_bits(mask), numel, int(mask.sum()), (0, 1, 2, 5)[(number + place) % 4]


Pooled = tuple[Tensor, list[Windows]]  # a max pool's indices, and its windows


def windows() -> Iterator[Pooled]:
    """Positions in windows of all kinds, of 1 to 32 bits; planes that begin at odd addresses."""
    line, plane = Windows(61, 31, 3, 1, 2, 1), Windows(9, 4, 3, 1, 0, 0)
    dilated, small = Windows(20, 7, 5, 3, 2, 3), Windows(7, 1, 1, 1, 1, 0)
    large = [Windows(90_000, 5, 65_536, 1, 4_000, 0), Windows(50_000, 3, 40_000, 1, 3_000, 5)]
    many = [line, line]  # more threads than two blocks have
    pools = ((2, 3, [line]), (5, 1, [small]), (3, 1, [line, plane]), (2, 1, [dilated, plane, line]))
    for *lead, axes in (*pools, (3, 1, large), (9, 1, many), (0, 1, many)):
        indices = torch.zeros(*lead, *(axis.number for axis in axes), dtype=torch.int64)
        for dim, axis in enumerate(axes):
            start = axis.starts(indices.device)
            first = (-start).clamp(min=0).add(axis.step - 1) // axis.step
            count = ((axis.size - 1 - start) // axis.step).clamp(max=axis.extent - 1) + 1 - first
            along = [-1] + [1] * (len(axes) - 1 - dim)
            start, first, count = (each.view(along) for each in (start, first, count))
            share = torch.rand(indices.shape, generator=torch.Generator().manual_seed(dim)).double()
            indices = indices * axis.size + start + axis.step * (first + (share * count).long())
        yield indices, axes


def mapped(kind: str) -> Iterator[Mapped]:
    """What `quantize_map` takes for this map."""
    return normalized() if kind == "normalize" else curves(kind)


def curves(kind: str) -> Iterator[Mapped]:
    """A derivative in groups of all kinds, whose last one is shorter; of numbers of all kinds."""
    ends = torch.tensor([0.0, -0.0, 1e-40, -87.0, 87.0, 90.0, -90.0, 1e15, -1e15])
    beyond = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38])
    for bits, group_size in itertools.product((1, 2, 3, 8), (32, 256, 1024, 100, 5000)):
        x = torch.cat([4 * randn(3 * group_size + 17, seed=bits), ends])
        x[2 * group_size :][: len(beyond)] = beyond
        for seed in (bits, None):
            yield Mapped(x, kind, None, None, 1, (bits, 2**bits, group_size), seed)
    yield Mapped(randn(700 * 64 + 9), kind, None, None, 1, (4, 15, 64), 5)
    for x in (randn(1001)[1:], randn(40, 30).t(), torch.empty(0)):
        yield Mapped(x, kind, None, None, 1, (4, 16, 64), 5)
    halves, sizes = (torch.float16, torch.bfloat16), (64, 128, 512, 2048, 5000)
    for dtype, group_size, bits in itertools.product(halves, sizes, (1, 4, 8)):
        x = 4 * randn(3 * group_size + 17, seed=bits)
        x[2 * group_size :][: len(beyond)] = beyond
        seed = bits if group_size > 64 else None
        yield Mapped(x.to(dtype), kind, None, None, 1, (bits, 2**bits, group_size), seed)


def normalized() -> Iterator[Mapped]:
    """Statistics of rows, channels, columns and all; with and without a mean."""
    shapes = (
        *(((8, 50, 48), 400, 48), ((40, 96), 96, 1), ((6, 8, 7, 7), 8, 49)),
        *(((9, 3, 257), 27, 257), ((3, 5), 15, 1), ((999,), 1, 999)),
    )
    products = itertools.product(shapes, (32, 256, 1024, 100, 5000))
    for number, ((shape, count, inner), group_size) in enumerate(products):
        x, rstd = randn(*shape), 0.5 + randn(count, seed=1).abs()
        mean = randn(count, seed=2) if number % 2 else None
        yield Mapped(x, "normalize", mean, rstd, inner, (4, 16, group_size), group_size - 200)
    x = randn(64, 16)
    x[3, 3], x[40, 2] = math.nan, math.inf
    rstd = torch.linspace(0, 3e38, 64)
    yield Mapped(x, "normalize", None, rstd, 16, (8, 200, 128), None)
    for dtype, bits, group_size in itertools.product(DTYPES, (1, 2, 4, 7), (64, 128, 2048)):
        x = randn(300, 200).to(dtype)
        yield Mapped(x, "normalize", randn(300), 1 + randn(300).abs(), 200, (bits, 2**bits, group_size), 3)


Product = tuple[Tensor, Sizes, Tensor]  # what is quantized, its settings, a factor


def products() -> Iterator[Product]:
    """Groups of all kinds, factors that allow no 16-byte accesses, and numbers that are none."""
    for bits, group_size in itertools.product(range(1, 9), (32, 128, 1024, 100, 5000)):
        x = randn(3 * group_size + 17, seed=bits).to(DTYPES[(bits + group_size) % 3])
        x[2 * group_size] = math.nan
        yield x, (bits, 2**bits, group_size, 0), randn(x.numel(), seed=9)
    factor = randn(1025)
    factor[5], factor[100] = math.nan, -math.inf
    yield randn(1024), (4, 16, 64, 0), factor[1:]
    yield 3e38 * randn(1024).clamp(-1, 1), (4, 16, 64, 0), factor[:-1]
    yield randn(700, 64), (4, 16, 64, 0), randn(700, 64, seed=1)
    yield torch.empty(0), (4, 16, 64, 0), torch.empty(0)


def gates(size: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, float, Tensor, float, int]]:
    """A tensor with zeros, NaN and Inf, its limit, a gradient, its slope, and neighbours that share a bit."""
    x, grad = randn(size).to(dtype), randn(size, seed=1).to(dtype)
    x[::5] = 0
    if size > 8:
        x[3], x[4], grad[5] = math.nan, math.inf, math.inf
    for limit, slope in ((0.0, 0.0), (0.1, 0.01), (0.25, -2.0)):
        for inner in (1, 7, 1000):
            if size % inner == 0:
                yield x, limit, grad, slope, inner


Norm = tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor, bool, float, tuple[int, int, int]]


def norms(dtype: torch.dtype, *more: tuple[int, int]) -> Iterator[Norm]:
    """What `norm_backward` takes, in these shapes and `more`; the sixth row is constant."""
    shapes = ((0, 8), (1, 1), (7, 10), (331, 48), (3, 5000), (100, 64), *more)
    kinds = ((3, 64, True), (8, 100, False), (4, 4096, True))
    for number, shape in enumerate(shapes, start=DTYPES.index(dtype)):
        for bits, group_size, centered in (kinds[number % 3], kinds[(number + 1) % 3]):
            sizes = bits, 2**bits, group_size
            grad, weight = randn(*shape, seed=1).to(dtype), randn(shape[1], seed=2).to(dtype)
            rstd = 0.5 + randn(shape[0], 1, seed=3).abs()
            rstd[5:6] = 99.0
            parts = packed(randn(*shape).to((dtype, torch.float32)[(number + bits) % 2]), sizes)
            yield parts, grad, rstd.to(dtype), weight, centered, 50.0, sizes


def exact_norm_backward(case: Norm) -> list[Tensor]:
    """What `norm_backward` returns, in float64."""
    parts, grad, rstd, weight, centered, limit, sizes = case
    x = reference.dequantize(*parts, grad.shape, torch.float32, *sizes, 0).double()
    x, r = x.masked_fill(rstd >= limit, 0), rstd.double()
    scaled = grad.double() * weight.double()
    dx = scaled - x * (scaled * x).mean(1, keepdim=True)
    dx = (dx - scaled.mean(1, keepdim=True) if centered else dx) * r
    return [dx, (grad.double() * x).sum(0), grad.double().sum(0)]


def softmaxes(
    shapes: Iterable[tuple[int, ...]] = ((0, 8), (7, 10), (331, 48), (5, 3000)),
) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor, tuple[int, int, int]]]:
    """What `softmax_backward` takes."""
    for shape in shapes:
        for sizes, dtype in itertools.product(((3, 8, 64), (8, 256, 100), (4, 16, 4096)), DTYPES):
            yield packed(randn(*shape).softmax(-1).to(dtype), sizes), randn(*shape), sizes


class CrossEntropy(NamedTuple):
    """What `cross_entropy_backward` takes; -100 is the target that is ignored."""

    parts: tuple[Tensor, Tensor]
    target: Tensor
    surplus: Tensor
    weight: Tensor | None
    grad: Tensor
    classes: int
    mean: bool
    sizes: tuple[int, int, int]

    def arguments(self, device: str = "cpu") -> tuple[Any, ...]:
        """What the op takes, on a device."""
        tensors = on(device, *self.parts, self.target, self.surplus, self.weight, self.grad)
        return *tensors, self.classes, -100, self.mean, *self.sizes


def cross_entropies(gaps: float = 0.001, widest: int = 5000) -> Iterator[CrossEntropy]:
    """Rows within groups and groups within rows; weights whose sum is exact in any order.

    `gaps`: the share of probabilities that are NaN or Inf.
    """
    for shape in ((0, 8), (5, 0), (9,), (6, 1), (67, 48), (2, 3, widest)):
        rows, classes = shape[:-1], shape[-1]
        generator = torch.Generator().manual_seed(classes)
        target = torch.randint(max(1, classes), rows, generator=generator)
        ignored = torch.rand(rows, generator=generator) < (0.2 if classes else 2)
        target = target.masked_fill(ignored, -100)
        weight = torch.randint(9, (classes,), generator=generator) / 8
        surplus, p = randn(*rows), with_gaps(randn(*shape).softmax(-1), gaps)
        kinds = (
            *((3, 64, True, torch.float32), (8, 100, False, torch.float32), (4, 4096, True, torch.float32)),
            *((4, 100, True, torch.float16), (3, 64, False, torch.bfloat16)),
        )
        for bits, group_size, mean, dtype in kinds:
            sizes = bits, 2**bits, group_size
            parts = packed(p.to(dtype), sizes)
            for scale, grad in ((weight, torch.tensor(2.5)), (None, randn(*rows, seed=1))):
                yield CrossEntropy(parts, target, surplus, scale, grad, classes, mean, sizes)
            nothing = torch.full_like(target, -100)
            yield CrossEntropy(parts, nothing, surplus, None, torch.tensor(2.5), classes, mean, sizes)


class BatchNorm(NamedTuple):
    """What `batch_norm_backward` takes."""

    parts: tuple[Tensor, Tensor]
    grad: Tensor
    rstd: Tensor
    weight: Tensor | None
    last: bool
    fixed: bool
    sizes: tuple[int, int, int]

    def arguments(self, device: str = "cpu") -> tuple[Any, ...]:
        """What the op takes, on a device."""
        tensors = on(device, *self.parts, self.grad, self.rstd, self.weight)
        return *tensors, self.last, self.fixed, *self.sizes

    def assert_right(self, dx: Tensor, dw: Tensor, db: Tensor) -> None:
        """Compare with float64. A sum may be small beside its terms."""
        axis = self.grad.dim() - 1 if self.last else 1
        x = reference.dequantize(*self.parts, self.grad.shape, torch.float32, *self.sizes, 0)
        x, grad = (each.double().movedim(axis, -1) for each in (x, self.grad))
        axes = [*range(grad.dim() - 1)]
        right = grad if self.fixed else grad - grad.mean(axes) - x * (grad * x).mean(axes)
        right = right * (self.rstd if self.weight is None else self.rstd * self.weight)
        assert (dx.movedim(axis, -1) - right).norm() <= 1e-6 * right.norm()
        for found, terms in ((dw, grad * x), (db, grad)):
            assert ((found - terms.sum(axes)).abs() <= 1e-6 * terms.abs().sum(axes)).all()


def batch_norms() -> Iterator[BatchNorm]:
    """Channels of one and of several elements per sample; of one portion and of several."""
    shapes = (
        *((0, 8), (3, 0, 5), (3, 4, 0), (1, 1), (331, 48), (40, 9), (2, 70_000), (4, 70, 1)),
        *((6, 8, 9, 9), (3, 90, 7, 7), (2, 3, 5000), (20, 5, 2), (1, 2100, 3)),
    )
    kinds = (
        *((3, 64, False, torch.float32), (8, 100, True, torch.float32), (4, 4096, False, torch.float32)),
        *((4, 64, True, torch.float16), (3, 100, False, torch.bfloat16)),
    )
    places = [(shape, last) for shape in shapes for last in (False, True)[: len(shape) - 1]]
    for number, (shape, last) in enumerate(place for place in places for _ in range(2)):
        bits, group_size, fixed, dtype = kinds[number % 5]
        channels, sizes = shape[-1 if last else 1], (bits, 2**bits, group_size)
        parts = packed(randn(*shape).to(dtype), sizes)
        weight = None if bits == 8 else randn(channels, seed=2)
        rstd = 0.5 + randn(channels, seed=3).abs()
        yield BatchNorm(parts, randn(*shape, seed=1), rstd, weight, last, fixed, sizes)


def survivors(dtype: torch.dtype) -> Iterator[tuple[Tensor, int]]:
    """What `sparsify` takes: one portion and several, ties, NaN and Inf, numbers of all sizes."""
    for numel in (0, 1, 31, 1000, 1024, 40_011):
        x = 40 * randn(numel, seed=numel)
        if numel > 31:
            x[17], x[20], x[-1] = math.nan, math.inf, -math.inf
        x = x if dtype.is_floating_point else x.nan_to_num(0, 0, 0)
        for count in {0, numel // 100, numel // 3, max(0, numel - 1), numel}:
            yield x.to(dtype), count
        yield torch.ones(numel).to(dtype), numel // 3
        yield (x / 32).round().to(dtype), numel // 5
    bits = torch.randint(-(2**63), 2**63 - 1, (3000,), generator=torch.Generator().manual_seed(0))
    yield bits.view(dtype), 2000
