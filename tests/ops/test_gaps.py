"""Groups that hold NaN or Inf: the other elements survive, by the reference and by every kernel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune import ops
from mesa_tune.codecs import CODECS, quantize
from mesa_tune.ops import fused as fused_ops
from mesa_tune.ops import reference
from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.reference import codecs as reference_codecs
from tests.builders import spec
from tests.cuda_cases import randn, with_gaps
from tests.ops.test_ops_kernels import assert_kernels_agree, needs_library
from tests.step_memory import Composed

LEVELS = [(2, 3), (2, 4), (3, 5), (3, 6), (5, 17), *((bits, 2**bits) for bits in range(3, 9))]
LARGEST = torch.finfo(torch.float32).max


@needs_library
@pytest.mark.parametrize(("bits", "levels"), [(1, 2), *LEVELS])
def test_kernels_give_the_references_bytes(bits: int, levels: int) -> None:
    scales = (1.0, 1e-37, 1e-42, 0.0, LARGEST)
    groups = ((1, 0), (7, 0), (256, 0), (4096, 0), (5000, 0), (10**6, 0), (256, 2))
    for number, (scale, sizes) in enumerate(itertools.product(scales, groups)):
        x = (randn(2, 6, 19, 23, seed=number).clamp(-1, 1) * scale).to(ops.DTYPES[(number + bits) % 3])
        x = with_gaps(x, (0.003, 0.2, 0.95)[number // 3 % 3], seed=number)
        layout = (x, x.to(memory_format=torch.channels_last), x[..., ::3])[(number + levels) % 3]
        assert_kernels_agree(layout, (bits, levels, *sizes), stochastic=number % 2 == 0, seed=number)


@needs_library
@pytest.mark.parametrize(("group_size", "groups"), [(7, 0), (256, 0), (5000, 0), (256, 2)])
def test_kernels_give_the_references_bytes_within_given_ranges(group_size: int, groups: int) -> None:
    given_ends = ((-0.5, 0.5), (0.25, 0.25), (-LARGEST, LARGEST / 2), (math.nan, math.nan))
    for dtype, given_end in itertools.product(ops.DTYPES, given_ends):
        x = with_gaps(randn(2, 6, 19, 23).to(dtype), 0.1)
        ends = torch.tensor(given_end).expand(reference.group_count(x.numel(), group_size, groups), 2)
        ranges = reference.with_gaps(reference.ranges_of(ends[:, 0], ends[:, 1], 6), 7)
        for stochastic in (True, False):
            given = (x, ranges, 3, 7, group_size, groups, stochastic, torch.tensor([3]))
            assert torch.equal(RAW.quantize_within(*given), reference_codecs.quantize_within(*given))


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
@pytest.mark.parametrize("stochastic", [True, False], ids=["stochastic", "nearest"])
def test_finite_elements_stay_within_a_step(stochastic: bool, dtype: torch.dtype) -> None:
    for bits, levels in LEVELS:
        x = with_gaps(randn(40, 100, seed=levels).to(dtype), 0.1)
        y = ops.dequantize(ops.quantize(x, bits, 100, levels=levels, stochastic=stochastic, seed=1))
        assert torch.equal(y.isnan(), ~x.isfinite())
        low, high = (end[:, None] for end in reference.finite_ends(x.float()))
        # The step is raised by less than 2**-13 of it; 16 bits round once more.
        step = (high - low) / (levels - 2) * (1 + 2.0**-13)
        most = step * (1.0 if stochastic else 0.5) + y.float().abs() * torch.finfo(dtype).eps + 1e-6
        assert ((y.float() - x.float()).abs() <= most)[x.isfinite()].all()


@pytest.mark.parametrize(("bits", "levels"), [(2, 3), (4, 16), (8, 200)])
def test_the_mean_over_seeds_of_finite_elements_is_their_value(bits: int, levels: int) -> None:
    seeds = 2000
    x = with_gaps(randn(256), 0.2)
    finite = x.isfinite()
    draws = [ops.dequantize(ops.quantize(x, bits, levels=levels, seed=seed)) for seed in range(seeds)]
    mean = torch.stack(draws).double().mean(0)
    ranges = reference.revealed(ops.quantize(x, bits, levels=levels).ranges)
    _, base, step = (each.double() for each in reference.unpack_ranges(ranges))
    position = (x.double() - base[0]) / step[0]
    fraction = position - position.floor()
    inner = finite & (fraction.minimum(1 - fraction) > 0.01)  # elsewhere the mean is not normal yet
    z = ((mean - x) / (step[0] * (fraction * (1 - fraction) / seeds).sqrt()))[inner]
    assert abs(z.mean()) < 4 / math.sqrt(z.numel())
    assert abs(z.square().mean() - 1) < 4 * math.sqrt(2 / z.numel())


@pytest.mark.parametrize("value", [0.0, -3.3, 1e-45, LARGEST, -LARGEST], ids=str)
@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_equal_finite_elements_decode_exactly(value: float, dtype: torch.dtype) -> None:
    x = torch.full((300,), value).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    x[::7] = math.inf
    for bits in range(2, 9):
        y = ops.dequantize(ops.quantize(x, bits, 100, seed=4))
        assert torch.equal(y[x.isfinite()], x[x.isfinite()])
        assert y[::7].isnan().all()


@pytest.mark.parametrize("bits", range(2, 9))
def test_ranges_that_end_at_the_largest_number_stay_finite(bits: int) -> None:
    for values in ([-LARGEST, LARGEST, 0.0, 1e38], [0.9 * LARGEST, LARGEST, 0.95 * LARGEST]):
        x = torch.tensor([*values, math.nan])
        y = ops.dequantize(ops.quantize(x, bits, seed=0))
        assert torch.equal(y.isfinite(), x.isfinite())
        half = (max(values) / 2 - min(values) / 2) / (2**bits - 2) * (1 + 2.0**-13)
        assert ((y / 2 - x / 2).abs()[:-1] <= half).all()


def test_groups_without_gaps_keep_their_bytes() -> None:
    x = randn(2560)
    whole = ops.quantize(x, 4, seed=3)
    x[700] = math.nan
    other = ops.quantize(x, 4, seed=3)
    rows = torch.arange(10) != 2
    assert torch.equal(other.ranges[rows], whole.ranges[rows])
    assert torch.equal(other.data.view(10, -1)[rows], whole.data.view(10, -1)[rows])
    assert not torch.equal(other.data, whole.data)


def test_nothing_finite_and_two_levels_are_nan_as_a_whole() -> None:
    x = torch.full((64,), math.inf)
    assert ops.dequantize(ops.quantize(x, 8, 64, seed=0)).isnan().all()
    x = randn(128)
    x[5] = -math.inf
    y = ops.dequantize(ops.quantize(x, 1, 64, seed=0))
    assert y[:64].isnan().all()
    assert y[64:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("levels", [3, 16, 255, 256])
def test_ranges_in_16_bits_bring_the_same_values(levels: int, dtype: torch.dtype) -> None:
    made = spec(level=levels, group_size=64)
    x = randn(64, 64).to(dtype)
    x[0], x[1], x[2] = 0.0, -3.0, torch.finfo(dtype).min
    x[3, :32], x[3, 32:] = torch.finfo(dtype).min, torch.finfo(dtype).max
    x[:60:2] = with_gaps(x[:60:2], 0.1)
    x[60] = math.nan
    parts = quantize.encode(x, made, torch.tensor([1]))
    assert parts[1].dtype == dtype
    decoded = quantize.decode(parts, x.shape, dtype, made)
    nearby = quantize.decode(quantize.encode_with_ranges(x, made, torch.tensor([1])), x.shape, dtype, made)
    finite = x.isfinite()
    assert torch.equal(decoded.isfinite(), finite)
    assert torch.equal(nearby.isfinite(), finite)
    low, high = (end.double()[:, None] for end in reference.finite_ends(x[:60].float()))
    near = (decoded[:60].double() - nearby[:60].double()).abs()
    eps = torch.finfo(dtype).eps
    assert (near <= (high - low + nearby[:60].double().abs()) * eps)[finite[:60]].all()
    for row in (0, 1, 2):
        assert torch.equal(decoded[row][finite[row]], x[row][finite[row]])


def test_samples_of_their_own_bits_survive() -> None:
    made, x = spec(level=16, allocation="sample"), with_gaps(randn(16, 512), 0.05)
    codec = CODECS[made.codec]
    y = codec.decode(codec.encode(x, made, torch.tensor([1])), x.shape, x.dtype, made)
    assert torch.equal(y.isfinite(), x.isfinite())
    assert (y - x)[x.isfinite()].square().mean() < 0.05


def test_products_and_kernels_of_rows_see_the_same() -> None:
    x = with_gaps(randn(40, 96), 0.02)
    packed = ops.quantize(x, 8, 64, seed=1)
    decoded, sizes = ops.dequantize(packed), (8, 256, 64)
    factor = randn(40, 96, seed=1)
    found = fused_ops.DEQUANTIZE_MUL(packed.data, packed.ranges, factor, *sizes)
    assert torch.equal(found.isnan(), decoded.isnan())
    assert torch.equal(found.nan_to_num(0), (factor * decoded).nan_to_num(0))
    dx = fused_ops.SOFTMAX_BACKWARD(packed.data, packed.ranges, factor, *sizes)
    assert torch.equal(dx.isnan().all(1), decoded.isnan().any(1))


def through(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of what is finite in x: others have none."""
    x = x.clone().requires_grad_()
    y: Tensor = module(x)
    torch.where(y.isfinite(), y, 0).square().sum().backward()
    gradients = [x.grad, *(each.grad for each in module.parameters())]
    module.zero_grad()
    return [each.clone() for each in gradients if each is not None]


def scaled() -> nn.Module:
    """x times a weight, where x is masked with -Inf."""
    weight = nn.Parameter(randn(64, 128, seed=5).abs() + 0.5)
    return Composed(lambda m, x: (x * m.weight).masked_fill(x == -math.inf, 0), weight=weight)


class Looked(nn.Linear):
    """A linear layer whose rows of NaN count for nothing, as those of -Inf do where they have no weight."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)[input.isfinite().all(1)]


@pytest.mark.parametrize(("level", "bound"), [(256, 3e-4), (16, 0.1)], ids=["8 bits", "4 bits"])
@pytest.mark.parametrize("make", [scaled, lambda: nn.Sequential(Looked(128, 32))], ids=["scaled", "looked"])
def test_gradients_beside_gaps_stay_near(make: Callable[[], nn.Module], level: int, bound: float) -> None:
    torch.manual_seed(0)
    module, x = make(), randn(64, 128)
    x[::9, ::17] = -math.inf
    exact = through(module, x)
    mt.convert(module, mt.Policy.uniform(level=level), seed=1)
    for found, right in zip(through(module, x), exact, strict=True):
        assert torch.equal(found.isfinite(), right.isfinite())
        finite = right.isfinite()
        error = (found - right)[finite].square().sum() / right[finite].square().sum()
        assert error < bound
