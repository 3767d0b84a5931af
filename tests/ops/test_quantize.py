"""What `ops.quantize` and `ops.dequantize` promise, whichever kernel runs."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mesa_tune import ops

BITS = range(1, 9)
EPS = torch.finfo(torch.float32).eps
LARGEST = torch.finfo(torch.float32).max

shapes = st.lists(st.integers(0, 9), max_size=5).map(tuple)
group_sizes = st.sampled_from([1, 3, 8, 64, 100, 256, 5000])
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


def steps_of(q: ops.Quantized, like: Tensor) -> Tensor:
    """The step of every element's group, in the shape of `like`."""
    return q.ranges[:, 1].repeat_interleave(q.group_size)[: like.numel()].view(like.shape)


def rounded(x: Tensor, bits: int, group_size: int = 256, **options: Any) -> Tensor:
    return ops.dequantize(ops.quantize(x, bits, group_size, **options))


@pytest.mark.parametrize("bits", BITS)
def test_errors_stay_within_half_a_step_or_one_step(bits: int) -> None:
    dtype = ops.DTYPES[bits % 3]
    x = torch.randn(3, 700, generator=torch.Generator().manual_seed(bits)).to(dtype).float()
    slack = 8 * EPS * x.abs().max()  # fp32 rounds the difference, the product and the sum once each
    for stochastic, share in ((False, 0.5), (True, 1.0)):
        q = ops.quantize(x, bits, 100, stochastic=stochastic, seed=1)
        error = (ops.dequantize(q) - x).abs()
        assert (error <= share * steps_of(q, x) + slack).all()
        assert error.max() > 0.4 * share * q.ranges[:, 1].min()


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_shape_dtype_and_contiguity_return(dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, 10).to(dtype).transpose(0, 2)
    y = rounded(x, 8)
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, dtype, True)
    assert torch.allclose(y.float(), x.float(), atol=0.05)


@pytest.mark.parametrize(("bits", "levels"), [(1, 2), (2, 3), (4, 10), (4, 16), (8, 200)])
def test_mean_over_seeds_is_the_value(bits: int, levels: int) -> None:
    seeds = 3000
    x = torch.randn(256, generator=torch.Generator().manual_seed(0))
    q = ops.quantize(x, bits, 256, levels=levels, seed=0)
    total = sum(rounded(x, bits, levels=levels, seed=seed).double() for seed in range(seeds))
    position = (x.double() - q.ranges[0, 0]) / q.ranges[0, 1]
    fraction = position - position.floor()
    error = q.ranges[0, 1] * (fraction * (1 - fraction) / seeds).sqrt()
    inner = fraction.minimum(1 - fraction) > 0.01  # elsewhere the mean is not normal yet
    z = ((total / seeds - x) / error)[inner]
    assert abs(z.mean()) < 4 / math.sqrt(z.numel())
    assert abs(z.square().mean() - 1) < 4 * math.sqrt(2 / z.numel())
    assert z.abs().max() < 4.5


def test_noise_of_elements_groups_and_seeds_is_unrelated() -> None:
    x = torch.linspace(0, 1, 256).repeat(64)
    errors = torch.stack([(rounded(x, 1, seed=seed) - x).view(64, 256) for seed in range(8)])
    # Of seeds, groups, elements, and pairs of a hash.
    by = ((errors[:-1], errors[1:]), (errors[:, :-1], errors[:, 1:]), (errors[..., :-1], errors[..., 1:]))
    for one, two in (*by, (errors[..., :128], errors[..., 128:])):
        pair = torch.stack([one.flatten(), two.flatten()])
        assert abs(torch.corrcoef(pair)[0, 1]) < 4 / math.sqrt(one.numel())


def test_equal_encodes_are_equal_and_seeds_differ() -> None:
    x = torch.randn(5000)
    first, again, other = (ops.quantize(x, 4, seed=seed) for seed in (11, 11, 12))
    assert torch.equal(first.data, again.data)
    assert not torch.equal(first.data, other.data)
    assert torch.equal(first.data, ops.quantize(x, 4, seed=torch.tensor(11)).data)
    assert torch.equal(first.data, ops.quantize(x.view(50, 100).t().contiguous().t(), 4, seed=11).data)


def test_noise_depends_on_the_stored_range() -> None:
    x = torch.randn(512)
    assert torch.equal(*(ops.quantize(t, 2, stochastic=False).data for t in (x, 2 * x)))
    assert not torch.equal(ops.quantize(x, 2, seed=1).data, ops.quantize(2 * x, 2, seed=1).data)


def test_every_int_is_a_seed() -> None:
    x = torch.randn(512)
    for seed in (0, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1):
        wrapped = torch.tensor([(seed + 2**63) % 2**64 - 2**63])
        assert torch.equal(ops.quantize(x, 3, seed=seed).data, ops.quantize(x, 3, seed=wrapped).data), seed


def test_without_a_seed_calls_differ_and_generators_stay() -> None:
    x = torch.randn(512)
    before = torch.get_rng_state()
    assert not torch.equal(ops.quantize(x, 2).data, ops.quantize(x, 2).data)
    assert torch.equal(torch.get_rng_state(), before)


def test_nan_and_inf_decode_to_nan_and_the_rest_of_their_group_survives() -> None:
    for bad, bits in itertools.product((math.nan, -math.nan, math.inf, -math.inf), BITS):
        x = torch.arange(30.0)
        x[13] = bad
        y = rounded(x, bits, 10, seed=0)
        assert y[13].isnan()
        if bits == 1:  # one code is not enough for the others
            assert y[10:20].isnan().all(), bad
        finite = y[torch.arange(30) // 10 != 1] if bits == 1 else y[torch.arange(30) != 13]
        assert finite.isfinite().all(), bad


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_a_constant_group_decodes_exactly(bits: int) -> None:
    for value in (0.0, -0.0, 1.0, -3.3, 1e-45, 1e-38, LARGEST, -LARGEST):
        x = torch.full((70,), value)
        assert torch.equal(rounded(x, bits, 32, seed=4), x), value
        assert torch.equal(rounded(x, bits, 32, stochastic=False), x), value


@pytest.mark.parametrize("bits", BITS)
def test_a_range_wider_than_float32_keeps_its_ends(bits: int) -> None:
    x = torch.tensor([-LARGEST, LARGEST, 0.0, 1e38])
    y = rounded(x, bits, seed=0)
    assert torch.allclose(y[:2], x[:2], rtol=1e-6)
    # The range itself does not fit; its half does.
    assert ((y / 2 - x / 2).abs() <= LARGEST / (2**bits - 1) * (1 + 1e-6)).all()


@pytest.mark.parametrize("bits", BITS)
def test_denormal_ranges_stay_within_the_smallest_normal_step(bits: int) -> None:
    for x in (torch.tensor([1e-45, 0.0, 3e-45, 1e-38, -2e-39]), torch.linspace(0, 1, 9) * 2.0**-122):
        step = max(2.0**-126, float(x.max() - x.min()) / (2**bits - 1))
        y = rounded(x, bits, seed=0)
        assert ((y - x).abs() <= step * (1 + 1e-6)).all()


@given(st.lists(numbers, min_size=1, max_size=40), st.integers(1, 8), st.integers(0, 2**31), st.booleans())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_values_stay_inside_their_group_and_ranges_cover_it(
    values: list[float], bits: int, seed: int, stochastic: bool
) -> None:
    x = torch.tensor(values)
    q = ops.quantize(x, bits, 1000, seed=seed, stochastic=stochastic)
    zero, step = q.ranges[0]
    factor = 0.25 if step < 0 else 1.0
    top = zero * factor + (2**bits - 1) * step.abs()
    assert zero == x.min()
    assert top >= x.max() * factor
    y = ops.dequantize(q)
    assert (y >= x.min()).all()
    assert (y * factor <= top).all()


def test_the_largest_value_of_a_group_never_wraps() -> None:
    # Rounding may put its position above the top level, and noise takes that up in one of some 10,000 groups.
    x = torch.rand(2**20, 2, generator=torch.Generator().manual_seed(0))
    step = (x[:, :1] - x[:, 1:]).abs() / 255
    assert ((rounded(x, 8, 2, seed=1) - x).abs() <= step * 1.001 + EPS).all()


@pytest.mark.parametrize("levels", [2, 3, 5, 10, 15])
def test_no_code_exceeds_the_levels(levels: int) -> None:
    x = torch.randn(4096)
    q = ops.quantize(x, 4, levels=levels, seed=0)
    codes = (ops.dequantize(q) - q.ranges[:, 0].repeat_interleave(256)) / steps_of(q, x)
    assert set(codes.round().int().tolist()) == set(range(levels))


@given(shapes, st.integers(1, 8), group_sizes)
@settings(deadline=None, max_examples=80)
def test_packed_bytes_are_those_of_quantize(shape: tuple[int, ...], bits: int, group_size: int) -> None:
    q = ops.quantize(torch.zeros(shape), bits, group_size, seed=0)
    numel = math.prod(shape)
    groups = math.ceil(numel / group_size)
    assert ops.packed_bytes(shape, bits, group_size) == q.nbytes == q.data.nbytes + q.ranges.nbytes
    assert ops.packed_bytes(numel, bits, group_size) == q.nbytes
    assert numel * bits / 8 <= q.data.nbytes <= numel * bits / 8 + bits * groups
    assert q.ranges.shape == (groups, 2)


def test_four_bits_take_what_the_design_says() -> None:
    assert ops.packed_bytes(2**20, 4) == 2**20 * 4.25 / 8
    assert ops.packed_bytes((2**33, 3), 4) == 3 * 2**33 * 4.25 / 8
    assert ops.packed_bytes((8, 12, 50), 2, quant_groups=5) == 8 * 12 * 50 / 4 + 5 * 8


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        *(((6,), 0), ((5, 6), 1), ((2, 5, 6), 2), ((4, 6, 3, 5), 1)),
        *(((2, 6, 3, 2, 5), 1), ((2, 1, 3, 1, 2, 6), 5)),
    ],
    ids=str,
)
def test_quant_groups_lie_along_channels_or_heads(shape: tuple[int, ...], axis: int) -> None:
    x = torch.randn(shape)
    for count in (1, 2, 3, 6):
        q = ops.quantize(x, 8, quant_groups=count, seed=0)
        parts = x.chunk(count, axis)
        assert torch.equal(q.ranges[:, 0], torch.stack([part.min() for part in parts]))
        assert q.nbytes == ops.packed_bytes(shape, 8, quant_groups=count)
        decoded = ops.dequantize(q).chunk(count, axis)
        for part, back, step in zip(parts, decoded, q.ranges[:, 1], strict=True):
            assert (part - back).abs().max() <= step * (1 + 1e-4)


def test_quant_groups_of_a_scalar_and_of_nothing() -> None:
    assert torch.equal(rounded(torch.tensor(2.5), 4, quant_groups=1), torch.tensor(2.5))
    q = ops.quantize(torch.empty(0, 6), 4, quant_groups=3)
    assert q.nbytes == ops.packed_bytes((0, 6), 4, quant_groups=3)
    assert ops.dequantize(q).shape == (0, 6)


@given(st.data())
@settings(deadline=None, max_examples=60, derandomize=True)
def test_strides_do_not_matter(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    order = data.draw(st.permutations(range(len(shape))))
    every = data.draw(st.integers(1, 3))
    base = torch.randn([*shape[:-1], shape[-1] * every])[..., ::every]
    x, group_size = base.permute(order), data.draw(group_sizes)
    strided, dense = (ops.quantize(t, 3, group_size, seed=1) for t in (x, x.contiguous()))
    assert torch.equal(strided.data, dense.data)
    assert torch.equal(strided.ranges, dense.ranges)
    out = torch.empty_like(base).permute(order)
    assert torch.equal(ops.dequantize(strided, out=out), ops.dequantize(dense))


def test_out_reuses_memory() -> None:
    x, y = torch.randn(2, 3000)
    first = ops.quantize(x, 4, seed=1)
    addresses = first.data.data_ptr(), first.ranges.data_ptr()
    second = ops.quantize(y, 4, seed=2, out=first)
    assert (second.data.data_ptr(), second.ranges.data_ptr()) == addresses
    assert torch.equal(second.data, ops.quantize(y, 4, seed=2).data)
    into = torch.full_like(y, 9)
    assert ops.dequantize(second, out=into) is into
    assert torch.equal(into, ops.dequantize(second))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        *(({"bits": 0}, ValueError, "bits=0"), ({"bits": 9}, ValueError, "bits=9")),
        *(({"bits": 4.0}, TypeError, "float"), ({"levels": 1}, ValueError, "levels=1")),
        ({"levels": 17}, ValueError, "levels=17, bits=4: more levels need more bits"),
        *(({"group_size": 0}, ValueError, "group_size=0"), ({"quant_groups": 0}, ValueError, "groups=0")),
        ({"quant_groups": 7}, ValueError, r"quant_groups=7 for 30.*choose a divisor"),
        *(({"seed": 1.5}, TypeError, "float"), ({"seed": torch.tensor([1.0])}, TypeError, "float32")),
        ({"seed": torch.tensor([1, 2])}, TypeError, r"shape \[2\]"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ops.quantize(torch.randn(2, 30), **{"bits": 4, **options})


def test_bad_tensors_are_named() -> None:
    x = torch.randn(2, 30)
    with pytest.raises(TypeError, match="float64: convert it"):
        ops.quantize(x.double(), 4)
    for out in (ops.quantize(x, 3), ops.quantize(x.half(), 4)):
        with pytest.raises(ValueError, match="same geometry"):
            ops.quantize(x, 4, out=out)
    with pytest.raises(ValueError, match=r"shape \[2, 30\].*has \[30, 2\]"):
        ops.dequantize(ops.quantize(x, 4), out=torch.empty(30, 2))


def test_gradients_do_not_flow_and_do_not_disturb() -> None:
    q = ops.quantize(torch.randn(300, requires_grad=True), 4)
    assert not q.ranges.requires_grad
    assert not ops.dequantize(q).requires_grad


@pytest.mark.parametrize("shape", [(2**40 + 5,), (2**20, 2**20 + 1), (3, 2**33)], ids=str)
def test_sizes_past_32_bits_on_the_meta_device(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device="meta")
    q = ops.quantize(x, 3, 64)
    groups = -(-math.prod(shape) // 64)
    assert q.ranges.shape == (groups, 2)
    assert q.nbytes == ops.packed_bytes(shape, 3, 64)
    assert ops.dequantize(q).shape == shape
