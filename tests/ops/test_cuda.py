"""The CUDA kernels on a GPU: the CPU's bytes, on any stream and device, in graphs, without waiting."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune import ops
from mesa_tune.ops import fused as fused_ops
from mesa_tune.ops import maps, reference
from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.reference.windows import flattened
from tests import cuda_cases
from tests.cuda_cases import Case, Mapped, Sizes, randn
from tests.ops.test_ops_kernels import same_bytes, same_numbers
from tests.ops.test_quantize_within import GROUPS, ranges_near

pytestmark = pytest.mark.gpu

SIZES = (4, 16, 256, 0)
KINDS = [kind for kind in maps.KINDS if kind != "normalize"]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(x: Tensor, device: str = "cuda") -> Tensor:
    """x with its strides and its offset, which `.cuda()` may change."""
    elements = x.untyped_storage().nbytes() // x.element_size()
    base = torch.as_strided(x, (elements,), (1,), 0).to(device)
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


def assert_right(x: Tensor, sizes: Sizes, seed: int | None) -> None:
    number = torch.tensor([seed or 0])
    here = torch.ops.mesa_tune.quantize(x, *sizes, seed is not None, number)
    there = torch.ops.mesa_tune.quantize(on_gpu(x), *sizes, seed is not None, number.cuda())
    assert all(same_bytes(a, b.cpu()) for a, b in zip(here, there, strict=True))
    for dtype in ops.DTYPES:
        decoded = torch.ops.mesa_tune.dequantize(*there, x.shape, dtype, *sizes)
        assert same_bytes(decoded.cpu(), torch.ops.mesa_tune.dequantize(*here, x.shape, dtype, *sizes))


def test_the_kernels_are_in_the_library() -> None:
    assert ops.native("cuda"), "build them: MESA_TUNE_CUDA=1 pip install --no-build-isolation -e ."


@pytest.mark.parametrize("cases", cuda_cases.CASES, ids=lambda cases: cases.__name__)
@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_groups(dtype: torch.dtype, cases: Callable[..., Iterator[Case]]) -> None:
    for case in cases(dtype):
        assert_right(*case)


def assert_mapped(case: Mapped) -> None:
    here = fused_ops.QUANTIZE_MAP(case.x, *case.arguments())
    there = fused_ops.QUANTIZE_MAP(on_gpu(case.x), *case.arguments("cuda"))
    assert all(same_bytes(a, b.cpu()) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("kind", maps.KINDS)
def test_maps(kind: str) -> None:
    for case in cuda_cases.mapped(kind):
        assert_mapped(case)


def test_derivatives_of_many_numbers() -> None:
    """Every 2**10th number of float32: each operation rounds as the CPU's does."""
    x = torch.arange(0, 2**32, 2**10).to(torch.int32).view(torch.float32)
    x = x[x.isfinite()].contiguous()
    for kind, bits in itertools.product(KINDS, (1, 8)):
        assert_mapped(Mapped(x, kind, None, None, 1, (bits, 2**bits, 32), None))


def test_products() -> None:
    for x, sizes, factor in cuda_cases.products():
        parts = cuda_cases.packed(x, sizes)
        here = fused_ops.DEQUANTIZE_MUL(*parts, factor, *sizes[:3])
        there = fused_ops.DEQUANTIZE_MUL(*(part.cuda() for part in parts), on_gpu(factor), *sizes[:3])
        assert same_numbers(there.cpu().view(-1), here.view(-1))


def test_levels() -> None:
    for x, kind, boundaries, values in cuda_cases.levels():
        here, there = (RAW.pack_levels(each, boundaries, kind) for each in (x, on_gpu(x)))
        assert all(same_numbers(b.cpu(), a) for a, b in zip(here, there, strict=True))
        for dtype in ops.DTYPES:
            back = [RAW.unpack_levels(*parts, values, x.shape, dtype) for parts in (here, there)]
            assert same_numbers(back[1].cpu(), back[0])


def test_positions() -> None:
    for bitmap, *sizes in cuda_cases.positions():
        there = RAW.pack_positions(on_gpu(bitmap), *sizes)
        assert torch.equal(there.cpu(), RAW.pack_positions(bitmap, *sizes))
        assert torch.equal(RAW.unpack_positions(there, *sizes).cpu(), bitmap)


def test_what_is_kept_is_described_where_a_kernel_makes_it() -> None:
    x = torch.ones(8, device="cuda")
    assert isinstance(maps.Deferred(x, "gelu", x.clone).if_dense(), maps.Deferred)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_number_is_read_and_written(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert_right(x, (1, 2, 1, 0), seed=0)
    values = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(0))
    ranges = torch.stack([values.to(torch.int32).view(torch.float32), torch.zeros(2**20)], 1)
    data = torch.zeros(2**20, dtype=torch.uint8)
    here, there = (
        torch.ops.mesa_tune.dequantize(data.to(on), ranges.to(on), (2**20,), dtype, 1, 2, 1, 0)
        for on in ("cpu", "cuda")
    )
    numbers = ~ranges[:, 0].isnan()
    assert same_bytes(there.cpu()[numbers], here[numbers])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_ends_in_16_bits(dtype: torch.dtype) -> None:
    for x, sizes, seed in cuda_cases.ends(dtype):
        settings = (*sizes, seed is not None, torch.tensor([seed or 0]))
        here, there = (torch.ops.mesa_tune.quantize_ends(each, *settings) for each in (x, on_gpu(x)))
        assert same_bytes(there[0].cpu(), here[0])
        assert torch.equal(there[1].cpu().nan_to_num(7.0), here[1].nan_to_num(7.0))
        decoded = torch.ops.mesa_tune.dequantize(*there, x.shape, dtype, *sizes).cpu()
        wanted = torch.ops.mesa_tune.dequantize(*here, x.shape, dtype, *sizes)
        assert torch.equal(decoded.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_rows_of_zeros(dtype: torch.dtype) -> None:
    for x in cuda_cases.rows_of_zeros(dtype):
        packed = torch.ops.mesa_tune.pack_zero_rows(on_gpu(x))
        assert torch.equal(packed.cpu(), torch.ops.mesa_tune.pack_zero_rows(x))
        settings = (4, 16, 64, True, torch.tensor([5]))
        here, there = (torch.ops.mesa_tune.quantize_rows(each, *settings) for each in (x, on_gpu(x)))
        assert all(same_numbers(part.cpu(), wanted) for part, wanted in zip(there, here, strict=True))
        decoded = [
            torch.ops.mesa_tune.dequantize(data, ranges, x.shape, dtype, 4, 16, 64, 0, zero_rows).cpu()
            for data, ranges, zero_rows in (here, there)
        ]
        assert same_numbers(*decoded)


def test_masks() -> None:
    for numel in (0, 1, 8, 31, 1003, 2**18 + 5):
        mask = (randn(numel + 1) > 0)[1:]
        packed = ops.pack_bits(on_gpu(mask))
        assert torch.equal(packed.cpu(), ops.pack_bits(mask))
        assert torch.equal(ops.unpack_bits(packed, mask.shape).cpu(), mask)


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_gates(dtype: torch.dtype) -> None:
    for size in (1, 1000, 7 * 10**5):
        for x, limit, grad, slope, inner in cuda_cases.gates(size, dtype):
            shut = fused_ops.PACK_AT_MOST(on_gpu(x), limit)
            assert torch.equal(shut.cpu(), fused_ops.PACK_AT_MOST(x, limit))
            bits = ops.pack_bits(x.view(-1, inner)[:, 0] <= limit)
            gated = fused_ops.MASK_GRAD(on_gpu(grad), bits.cuda(), slope, inner)
            assert same_numbers(gated.cpu(), fused_ops.MASK_GRAD(grad, bits, slope, inner))


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_norms_backward(dtype: torch.dtype) -> None:
    rounding = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    for case in cuda_cases.norms(dtype):
        parts, grad, rstd, weight, *rest, sizes = case
        arguments = [each.cuda() for each in (*parts, grad, rstd, weight)]
        found = fused_ops.NORM_BACKWARD(*arguments, *rest, *sizes)
        again = fused_ops.NORM_BACKWARD(*arguments, *rest, *sizes)
        for one, two, right in zip(found, again, cuda_cases.exact_norm_backward(case), strict=True):
            assert same_numbers(one.cpu(), two.cpu())
            assert (one.cpu() - right).norm() <= rounding * right.norm()


def test_softmax_backward() -> None:
    for parts, grad, sizes in cuda_cases.softmaxes():
        found = fused_ops.SOFTMAX_BACKWARD(*(part.cuda() for part in parts), grad.cuda(), *sizes).cpu()
        expected = fused_ops.SOFTMAX_BACKWARD(*parts, grad, *sizes)
        assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_cross_entropy_backward() -> None:
    for case in cuda_cases.cross_entropies():
        found = fused_ops.CROSS_ENTROPY_BACKWARD(*case.arguments("cuda"))
        expected = fused_ops.CROSS_ENTROPY_BACKWARD(*case.arguments())
        assert cuda_cases.equal(found.cpu(), expected)


def test_batch_norm_backward() -> None:
    for case in cuda_cases.batch_norms():
        found = fused_ops.BATCH_NORM_BACKWARD(*case.arguments("cuda"))
        again = fused_ops.BATCH_NORM_BACKWARD(*case.arguments("cuda"))
        assert all(same_numbers(one.cpu(), two.cpu()) for one, two in zip(found, again, strict=True))
        case.assert_right(*(each.cpu() for each in found))


@pytest.mark.parametrize("dtype", cuda_cases.SPARSE_DTYPES, ids=str)
def test_survivors(dtype: torch.dtype) -> None:
    large = (randn(5, 20_011, 7) * 40).to(dtype)
    for x, count in (*cuda_cases.survivors(dtype), (large, large.numel() // 10), (large.mT, 30_000)):
        found, again = (RAW.sparsify(on_gpu(x), count) for _ in range(2))
        for one, two, right in zip(found, again, RAW.sparsify(x, count), strict=True):
            assert same_bytes(one.cpu(), two.cpu())
            assert same_bytes(one.cpu(), right)
        bitmap, values = (each.cpu() for each in found)
        assert same_bytes(RAW.densify(*found, x.shape).cpu(), RAW.densify(bitmap, values, x.shape))
    with pytest.raises(RuntimeError, match="expected 0 to 100 survivors, but got 101"):
        RAW.sparsify(torch.ones(100, device="cuda"), 101)


@pytest.mark.parametrize(("group_size", "groups", "dtype"), GROUPS, ids=str)
def test_given_ranges(group_size: int, groups: int, dtype: torch.dtype) -> None:
    x = randn(2, 6, 37, 41).to(dtype)
    ends = torch.ops.mesa_tune.extents(on_gpu(x), group_size, groups)
    assert same_numbers(ends.cpu(), torch.ops.mesa_tune.extents(x, group_size, groups))
    ranges, sizes = ranges_near(x, 8, group_size, groups, 0.1), (3, 8, group_size, groups)
    for seed in (None, torch.tensor([3])):
        here = torch.ops.mesa_tune.quantize_within(x, ranges, *sizes, seed is not None, seed)
        there = torch.ops.mesa_tune.quantize_within(
            on_gpu(x), ranges.cuda(), *sizes, seed is not None, None if seed is None else seed.cuda()
        )
        assert same_bytes(there.cpu(), here)


def test_windows() -> None:
    for indices, windows in cuda_cases.windows():
        flat = flattened(windows)
        packed = RAW.pack_windows(on_gpu(indices), flat)
        assert torch.equal(packed.cpu(), RAW.pack_windows(indices, flat))
        assert torch.equal(RAW.unpack_windows(packed, flat, indices.shape).cpu(), indices)
    with pytest.raises(RuntimeError, match="expected at most 3 dimensions on CUDA"):
        RAW.pack_windows(torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cuda"), [1, 1, 1, 1, 1, 0] * 4)


def test_memory_that_is_given_is_used() -> None:
    x, y = randn(2, 3000).cuda()
    first = ops.quantize(x, 4, seed=1)
    address = first.data.data_ptr()
    second = ops.quantize(y, 4, seed=2, out=first)
    assert second.data.data_ptr() == address
    assert torch.equal(second.data, ops.quantize(y, 4, seed=2).data)
    out = torch.zeros(30, 100, device="cuda").t()
    ops.dequantize(ops.quantize(y.view(100, 30), 4, seed=2), out=out)
    assert torch.equal(out, ops.dequantize(second).view(100, 30))


def test_a_seed_on_the_cpu_is_the_same_seed() -> None:
    x = randn(5000).cuda()
    seeds = (7, torch.tensor([7]), torch.tensor([7], device="cuda"))
    one, *others = (ops.quantize(x, 4, seed=seed).data for seed in seeds)
    assert all(torch.equal(one, other) for other in others)


def memory(gigabytes: int) -> None:
    if torch.cuda.mem_get_info()[0] < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory")


def test_more_than_2_to_the_31_elements() -> None:
    memory(16)
    block, times = 2**20, 2**11 + 1
    x = randn(block).bfloat16().cuda().repeat(times)
    seed = torch.tensor([5], device="cuda")
    data, ranges = torch.ops.mesa_tune.quantize(x, *SIZES, True, seed)
    groups = block // 256
    rows, last = x[-block:].view(groups, 256).float(), ranges[-groups:]
    codes = reference.round_rows(rows, last, 16, seed, (times - 1) * groups)
    assert torch.equal(ranges.view(times, -1), ranges[:groups].view(1, -1).expand(times, -1))
    assert torch.equal(data.view(times, -1)[-1], reference.pack_rows(codes, 4).flatten())
    decoded = torch.ops.mesa_tune.dequantize(data, ranges, x.shape, x.dtype, *SIZES)
    assert torch.equal(decoded[-block:], reference.values_of(codes, last, 16).to(x.dtype).flatten())


def test_noise_past_element_2_to_the_32_of_one_group() -> None:
    memory(4)
    row = torch.linspace(0, 1, 2**16, device="cuda")
    numel = 2**32 + 2**17
    q = ops.quantize(row.expand(numel // 2**16, -1), 1, numel, seed=9)
    plane = numel // 8
    element = torch.arange(2**32 - 1000, 2**32 + 1000, device="cuda")
    found = (q.data[element % plane] >> (element // plane)) & 1
    noise = reference.noise(torch.tensor([9]), 0, q.ranges, element)[0]
    assert torch.equal(found, reference.round_up(row[element % 2**16], noise).to(torch.uint8))


def test_work_goes_to_the_current_stream() -> None:
    x, seed = randn(2**20).cuda(), torch.tensor([3], device="cuda")
    late = torch.zeros_like(x)
    wanted = ops.dequantize(ops.quantize(x, 4, seed=seed))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # on another stream the kernels would see zeros
        late.copy_(x)
        got = ops.dequantize(ops.quantize(late, 4, seed=seed))
    stream.synchronize()
    assert torch.equal(got, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_device_that_is_not_the_current_one() -> None:
    x = randn(3000)
    here, there = (ops.quantize(t, 4, seed=3) for t in (x, x.to("cuda:1")))
    assert there.data.device == torch.device("cuda:1")
    assert torch.equal(here.data, there.data.cpu())
    assert torch.equal(ops.dequantize(here), ops.dequantize(there).cpu())


def test_a_graph_sees_new_values_and_seeds() -> None:
    x, seed = randn(2**16 + 3).cuda(), torch.tensor([1], device="cuda")

    def work() -> tuple[Tensor, ...]:
        q = ops.quantize(x, 4, seed=seed)
        columns = ops.quantize(x[:-3].view(64, -1), 3, quant_groups=4, seed=seed)
        made = fused_ops.QUANTIZE_MAP(x, maps.KINDS["gelu"], None, None, 1, 4, 16, 256, True, seed)
        product = fused_ops.DEQUANTIZE_MUL(*made, x, 4, 16, 256)
        return q.data, ops.dequantize(q), ops.dequantize(columns), *made, product

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    for turn in range(3):
        x.copy_(randn(x.numel(), seed=turn))
        seed.fill_(turn)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(made, work(), strict=True))


@no_waiting()
def test_the_host_does_not_wait_for_the_kernels() -> None:
    x = torch.zeros(64, 300, device="cuda")
    kinds: tuple[dict[str, Any], ...] = ({}, {"seed": 1}, {"quant_groups": 4}, {"stochastic": False})
    for options in kinds:
        ops.dequantize(ops.quantize(x.t() if options else x, 4, **options))
    ops.unpack_bits(ops.pack_bits(x > 0), x.shape)
    RAW.densify(*RAW.sparsify(x, 1000), x.shape)
    windows = [1, 300, 1, 1, 0, 0]
    RAW.unpack_windows(RAW.pack_windows(x.long(), windows), windows, x.shape)
    seed, rstd = torch.ones(1, dtype=torch.int64, device="cuda"), torch.ones(64, device="cuda")
    for group_size in (256, 100):
        sizes = (4, 16, group_size)
        parts = fused_ops.QUANTIZE_MAP(x, maps.KINDS["normalize"], None, rstd, 300, *sizes, True, seed)
        fused_ops.DEQUANTIZE_MUL(*parts, x, *sizes)
        target, rows = torch.zeros(64, dtype=torch.int64, device="cuda"), (300, -100, True)
        fused_ops.CROSS_ENTROPY_BACKWARD(*parts, target, rstd, x[0], rstd, *rows, *sizes)
        fused_ops.BATCH_NORM_BACKWARD(*parts, x, x[0], None, False, False, *sizes)


STORES = ("level: 16", "level: 16\n    quant_groups: 4", "ema_decay: 0.9", "drop: 0.9", "allocation: sample")


@pytest.mark.parametrize("store", STORES)
def test_the_host_does_not_wait_in_a_training_step(store: str) -> None:
    tags = "fc gelu layernorm relu softmax matmul attention"
    layers = [nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.ReLU(), nn.Softmax(-1), nn.Linear(64, 64)]
    model = nn.Sequential(*layers).cuda()
    rules = "".join(f"on {tag}:\n    by_index: all\n    enable: True\n    {store}\n" for tag in tags.split())
    mt.convert(model, mt.Policy.parse("# mesa-tune policy 1\n" + rules), seed=1, min_elements=0)
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    model(x).square().mean().backward()  # the first step may make what later ones keep
    with no_waiting():
        model(x).square().mean().backward()
