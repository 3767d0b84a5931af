"""The CUDA kernels give the reference's bytes, tried without a GPU: compiled for the host, threads as fibers.

`tests/cuda_on_host` stands in for CUDA's runtime. What it cannot show is what a GPU does by itself: the few
instructions under `__CUDA_ARCH__`, memory, streams. `tests/ops/test_cuda.py` does that where there is one.
"""

import ctypes
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes import c_bool, c_float, c_int, c_int64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mesa_tune import ops
from mesa_tune.ops import fused as fused_ops
from mesa_tune.ops import maps, reference
from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.reference import codecs as reference_codecs
from mesa_tune.ops.reference import levels as reference_levels
from mesa_tune.ops.reference import windows as reference_windows
from tests import cuda_cases
from tests.cuda_cases import Case, Mapped, Sizes, randn
from tests.ops.test_ops_kernels import quant_groups, same_bytes, same_numbers, tensors
from tests.ops.test_quantize_within import given_ranges

ROOT = Path(__file__).resolve().parents[2]
KERNELS = (
    *("batch_norm", "cross_entropy", "gate", "levels", "norm", "pack_bits", "pack_windows"),
    *("pack_zero_rows", "positions", "quantize", "quantize_map", "quantize_within", "softmax", "sparsify"),
)
SOURCES = (*(f"csrc/cuda/{name}.cu" for name in KERNELS), "tests/cuda_on_host/kernels.cpp")
FLAGS = "-std=c++17 -O1 -ffp-contract=off -fno-strict-aliasing -shared -fPIC -Itests/cuda_on_host -Icsrc"
COMPILER = os.environ.get("CXX", "c++")

pytestmark = [
    pytest.mark.slow("processes"),
    pytest.mark.skipif(shutil.which(COMPILER.split()[0]) is None, reason="needs a C++ compiler"),
]

Kernels = ctypes.CDLL
NO_SIZES = (1, 2, 1, 0)


TYPES = {"pointer": c_void_p, "int64": c_int64, "int": c_int, "float": c_float, "bool": c_bool}


def structure(fields: str) -> Any:
    """A structure of C: of each type, the names of the fields that follow it."""
    kind, members = "", []
    for word in fields.split():
        if word in TYPES:
            kind = word
        else:
            members.append((word, TYPES[kind]))
    return type("Structure", (ctypes.Structure,), {"_fields_": members})


# A tensor, its settings and its packed memory, with ranges or ends: `Problem` of kernels.cpp.
Problem = structure(
    "pointer tensor sizes strides int64 dims numel int dtype int64 bits levels group_size quant_groups "
    "pointer data ranges ends int ends_dtype"
)
# The structures of these names in the headers of csrc/, as those after them.
Map = structure("int kind pointer mean rstd int64 inner count")
ZeroRows = structure("pointer data int64 rows width")
Positions = structure("int64 numel count low")
CrossEntropyBackward = structure(
    "pointer target surplus weight grad bool single_grad mean int64 ignore rows classes pointer dx"
)
BatchNormBackward = structure(
    "pointer grad rstd weight int64 samples channels positions bool fixed pointer dx dw db"
)


class FewWindows(ctypes.Structure):
    _fields_ = (("axes", c_int64 * 18), ("dims", c_int64), ("planes", c_int64))


class FewLevels(ctypes.Structure):
    _fields_ = (("numbers", c_float * 16), ("count", c_int), ("planes", c_int))


@pytest.fixture(scope="module", name="kernels")
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    library = tmp_path_factory.mktemp("cuda_on_host") / "kernels.so"
    command = [*COMPILER.split(), *FLAGS.split(), "-x", "c++", *SOURCES, "-o", str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def problem(x: Tensor, sizes: Sizes, data: Tensor, ranges: Tensor, call: Callable[[Any], None]) -> None:
    """Calls with the address of the problem, whose parts live that long."""
    shape, strides = ((c_int64 * x.dim())(*numbers) for numbers in (x.shape, x.stride()))
    addresses = (x.data_ptr(), ctypes.addressof(shape), ctypes.addressof(strides))
    dtype, stored = (ops.DTYPES.index(each.dtype) for each in (x, ranges))
    both = (None, ranges.data_ptr()) if stored else (ranges.data_ptr(), None)
    packed = (data.data_ptr(), *both, stored)
    call(ctypes.byref(Problem(*addresses, x.dim(), x.numel(), dtype, *sizes, *packed)))


def memory(x: Tensor, sizes: Sizes, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """What x is encoded to, with something else in it; `dtype`: of ranges, or of ends."""
    bits, _, group_size, groups = sizes
    data = torch.full((reference.data_bytes(x.numel(), bits, group_size, groups),), 0xAA, dtype=torch.uint8)
    return data, torch.full((reference.group_count(x.numel(), group_size, groups), 2), 7.0).to(dtype)


def encode(
    kernels: Kernels, x: Tensor, sizes: Sizes, seed: int | None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    data, ranges = memory(x, sizes, dtype)
    number = ctypes.byref(c_int64(seed or 0))
    problem(x, sizes, data, ranges, lambda p: kernels.quantize(p, seed is not None, number))
    return data, ranges


def decode(kernels: Kernels, data: Tensor, ranges: Tensor, out: Tensor, sizes: Sizes) -> Tensor:
    problem(out, sizes, data, ranges, kernels.dequantize)
    return out


def assert_right(kernels: Kernels, x: Tensor, sizes: Sizes, seed: int | None) -> None:
    """In ranges, and if x has 16 bits, in ends."""
    expected = reference.quantize(x, *sizes, seed is not None, torch.tensor([seed or 0]))
    for stored in {torch.float32, x.dtype}:
        data, ranges = encode(kernels, x, sizes, seed, stored)
        assert same_bytes(data, expected[0])
        if stored == torch.float32:
            assert same_bytes(ranges, expected[1])
        else:
            assert same_numbers(ranges, reference.ends_of(expected[1], sizes[1], stored))
        for dtype in ops.DTYPES:
            wanted = reference.dequantize(data, ranges, x.shape, dtype, *sizes)
            decoded = decode(kernels, data, ranges, torch.full(x.shape, 5).to(dtype), sizes)
            assert same_numbers(decoded, wanted)


@pytest.mark.parametrize("cases", cuda_cases.CASES, ids=lambda cases: cases.__name__)
def test_groups(kernels: Kernels, cases: Callable[..., Iterator[Case]]) -> None:
    for case in itertools.chain.from_iterable(map(cases, ops.DTYPES)):
        assert_right(kernels, *case)


def assert_mapped(kernels: Kernels, case: Mapped) -> None:
    x, rstd, sizes = case.x, case.rstd, (*case.sizes, 0)
    data, ranges = memory(x, sizes, x.dtype)
    mean, deviation = (None if each is None else each.data_ptr() for each in (case.mean, rstd))
    count = 1 if rstd is None else rstd.numel()
    made = ctypes.byref(Map(maps.KINDS[case.kind], mean, deviation, case.inner, count))
    number = ctypes.byref(c_int64(case.seed or 0))
    problem(x, sizes, data, ranges, lambda p: kernels.quantize_map(p, made, case.seed is not None, number))
    expected = fused_ops.quantize_map(x, *case.arguments())
    assert same_numbers(ranges, expected[1])
    assert same_bytes(data, expected[0])


@pytest.mark.parametrize("kind", maps.KINDS)
def test_maps(kernels: Kernels, kind: str) -> None:
    for case in cuda_cases.mapped(kind):
        assert_mapped(kernels, case)


@given(st.data())
@settings(deadline=None, max_examples=40, derandomize=True)
def test_any_statistics(kernels: Kernels, data: st.DataObject) -> None:
    turns, count, inner = (data.draw(st.integers(1, most)) for most in (6, 40, 70))
    bits, group_size = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([1, 32, 64, 100, 256, 10**6]))
    mean = data.draw(st.sampled_from([None, randn(count, seed=1)]))
    x, rstd = randn(turns, count, inner), randn(count, seed=2).abs()
    seed = data.draw(st.none() | st.integers(-(2**63), 2**63 - 1))
    assert_mapped(kernels, Mapped(x, "normalize", mean, rstd, inner, (bits, 2**bits, group_size), seed))


def test_products(kernels: Kernels) -> None:
    for x, sizes, factor in cuda_cases.products():
        parts = cuda_cases.packed(x, sizes)
        out = torch.full(x.shape, 5.0)
        multiply = partial(_with, kernels.dequantize_mul, c_void_p(factor.data_ptr()))
        problem(out, sizes, *parts, multiply)
        assert same_numbers(out, fused_ops.dequantize_mul(*parts, factor, *sizes[:3]))


@given(st.data())
@settings(deadline=None, max_examples=40, derandomize=True)
def test_any_tensor(kernels: Kernels, data: st.DataObject) -> None:
    x = data.draw(tensors())
    bits = data.draw(st.integers(1, 8))
    groups = data.draw(quant_groups(x))
    group_size = data.draw(st.sampled_from([1, 32, 64, 100, 256, 10**6]))
    seed = data.draw(st.none() | st.integers(-(2**63), 2**63 - 1))
    assert_right(kernels, x, (bits, data.draw(st.integers(2, 2**bits)), group_size, groups), seed)


def test_strided_results_and_unaligned_data(kernels: Kernels) -> None:
    sizes = (4, 16, 64, 0)
    x = randn(20, 50)
    data, ranges = encode(kernels, x.t(), sizes, 1)
    moved = torch.empty(data.numel() + 1, dtype=torch.uint8)[1:].copy_(data)
    wanted = reference.dequantize(data, ranges, (50, 20), x.dtype, *sizes)
    for planes, out in ((data, torch.zeros(20, 50).t()), (moved, torch.zeros(50, 20))):
        assert same_bytes(decode(kernels, planes, ranges, out, sizes), wanted)


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_whole_groups_take_one_launch_each_way(kernels: Kernels, dtype: torch.dtype) -> None:
    """A partial group at the end takes one to measure and one to encode, and one to decode."""
    sizes = (4, 16, 64, 0)
    for numel, launches in ((640, (1, 1)), (643, (3, 2))):
        x = randn(numel).to(dtype)
        before = kernels.launch_count()
        assert_mapped(kernels, Mapped(x, "gelu", None, None, 1, sizes[:3], 1))
        assert kernels.launch_count() - before == launches[0]
        before = kernels.launch_count()
        data, ranges = encode(kernels, x, sizes, 1, dtype)
        between = kernels.launch_count()
        decode(kernels, data, ranges, torch.empty_like(x), sizes)
        assert (between - before, kernels.launch_count() - between) == launches


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_rows_of_zeros(kernels: Kernels, dtype: torch.dtype) -> None:
    for x in cuda_cases.rows_of_zeros(dtype):
        rows, width = math.prod(x.shape[:-1]), x.shape[-1]
        data = torch.full((reference.plane_bytes(rows),), 0xAA, dtype=torch.uint8)
        zero_rows = ctypes.byref(ZeroRows(data.data_ptr(), rows, width))
        none = torch.empty(0)
        problem(x, (1, 2, 1, 0), none, none, partial(_with, kernels.pack_zero_rows, zero_rows))
        assert torch.equal(data, reference.pack_zero_rows(x))
        dense = torch.ones_like(x, memory_format=torch.contiguous_format)
        size = c_int64(width * x.element_size())
        kernels.clear_rows(c_void_p(data.data_ptr()), c_int64(rows), size, c_void_p(dense.data_ptr()))
        assert torch.equal(dense == 0, (x == 0).all(-1, keepdim=True).expand_as(x))


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_a_tensor_and_its_rows_of_zeros(kernels: Kernels, dtype: torch.dtype) -> None:
    """In one launch where all groups are whole, and take one pass."""
    seed = ctypes.byref(c_int64(3))
    tensors = (*cuda_cases.rows_of_zeros(dtype), randn(640, 64).relu().to(dtype))
    for x, group_size in itertools.product(tensors, (64, 100)):
        sizes = (4, 16, group_size, 0)
        rows, width = math.prod(x.shape[:-1]), x.shape[-1]
        expected = RAW.quantize_rows(x, *sizes[:3], True, torch.tensor([3]))
        data, ranges = memory(x, sizes, dtype)
        marks = torch.full((reference.plane_bytes(rows),), 0xAA, dtype=torch.uint8)
        zero_rows = ctypes.byref(ZeroRows(marks.data_ptr(), rows, width))
        before = kernels.launch_count()
        problem(x, sizes, data, ranges, partial(_with, kernels.quantize_rows, True, seed, zero_rows))
        launches = kernels.launch_count() - before
        assert torch.equal(marks, expected[2])
        assert same_bytes(data, expected[0])
        assert same_numbers(ranges, expected[1])
        if x.is_contiguous() and x.numel() % group_size == 0 and group_size == 64 and x.numel():
            assert launches == 1


def test_masks(kernels: Kernels) -> None:
    for numel in (0, 1, 8, 31, 1003, 2**15 + 5):
        mask = (randn(numel + 1) > 0)[1:]
        packed = torch.full((reference.plane_bytes(numel),), 0xAA, dtype=torch.uint8)
        kernels.pack_bits(c_void_p(mask.data_ptr()), c_int64(numel), c_void_p(packed.data_ptr()))
        assert torch.equal(packed, reference.pack_bits(mask))
        back = torch.zeros(numel, dtype=torch.bool)
        kernels.unpack_bits(c_void_p(packed.data_ptr()), c_int64(numel), c_void_p(back.data_ptr()))
        assert torch.equal(back, mask)


def test_windows(kernels: Kernels) -> None:
    for indices, windows in cuda_cases.windows():
        flat = reference_windows.flattened(windows)
        planes = reference_windows.offset_bits(flat)
        few = ctypes.byref(FewWindows((c_int64 * 18)(*flat), len(windows), planes))
        numel = indices.numel()
        size = planes * reference.plane_bytes(numel)
        memory = torch.full((size + 1,), 0xAA, dtype=torch.uint8)
        packed, back = memory[:-1], torch.full_like(indices, -7)
        kernels.pack_windows(c_void_p(indices.data_ptr()), c_int64(numel), few, c_void_p(packed.data_ptr()))
        assert torch.equal(packed, reference_windows.pack_windows(indices, flat))
        assert memory[-1] == 0xAA
        kernels.unpack_windows(c_void_p(packed.data_ptr()), c_int64(numel), few, c_void_p(back.data_ptr()))
        assert torch.equal(back, indices)


def _with(kernel: Callable[..., None], *arguments_and_problem: Any) -> None:
    *arguments, first = arguments_and_problem
    kernel(first, *arguments)


def few_levels(numbers: list[float], planes: int) -> Any:
    """The numbers, and the last one again."""
    full = numbers + numbers[-1:] * (16 - len(numbers))
    return ctypes.byref(FewLevels((c_float * 16)(*full), len(numbers), planes))


def test_levels(kernels: Kernels) -> None:
    for x, kind, boundaries, values in cuda_cases.levels():
        expected = reference_levels.pack_levels(x, boundaries, kind)
        planes = reference_levels.level_bits(len(values))
        data, offset = torch.full_like(expected[0], 0xAA), torch.full((1,), 7.0)
        address, none, few = c_void_p(offset.data_ptr()), torch.empty(0), few_levels(boundaries, planes)
        problem(x, NO_SIZES, data, none, partial(_with, kernels.pack_levels, few, kind, address))
        assert torch.equal(data, expected[0])
        assert same_numbers(offset, expected[1])
        for dtype in ops.DTYPES:
            out = torch.full(x.shape, 5).to(dtype)
            unpack = partial(_with, kernels.unpack_levels, few_levels(values, planes), address)
            problem(out, NO_SIZES, data, none, unpack)
            assert same_numbers(out, reference_levels.unpack_levels(data, offset, values, x.shape, dtype))


def test_positions(kernels: Kernels) -> None:
    for bitmap, *sizes in cuda_cases.positions():
        expected, task = RAW.pack_positions(bitmap, *sizes), ctypes.byref(Positions(*sizes))
        data, back = torch.full_like(expected, 0xAA), torch.full_like(bitmap, 0xAA)
        there, source = c_void_p(data.data_ptr()), c_void_p(bitmap.data_ptr())
        kernels.pack_positions(source, task, there)
        assert torch.equal(data, expected)
        kernels.unpack_positions(there, task, c_void_p(back.data_ptr()))
        assert torch.equal(back, bitmap)


def assert_gated(kernels: Kernels, x: Tensor, limit: float, grad: Tensor, slope: float, inner: int) -> None:
    none, most = torch.empty(0), c_float(torch.tensor(limit).to(x.dtype).item())
    shut = torch.full((reference.plane_bytes(x.numel()),), 0xAA, dtype=torch.uint8)
    problem(x, NO_SIZES, shut, none, lambda p: kernels.pack_at_most(p, most))
    assert torch.equal(shut, ops.pack_bits(x <= limit))
    bits, out = ops.pack_bits(x.view(-1, inner)[:, 0] <= limit), torch.full_like(grad, 7)

    arguments = (c_float(slope), c_int64(inner))

    def shutting(p: Any) -> None:
        problem(out, NO_SIZES, none, none, lambda to: kernels.gate(p, to, *arguments))

    problem(grad, NO_SIZES, bits, none, shutting)
    assert same_numbers(out, fused_ops.mask_grad(grad, bits, slope, inner))


def test_gates(kernels: Kernels) -> None:
    for size, dtype in itertools.product((0, 1, 8, 1000, 7000), ops.DTYPES):
        for case in cuda_cases.gates(size, dtype):
            assert_gated(kernels, *case)


def norm_backward(kernels: Kernels, case: cuda_cases.Norm) -> list[Tensor]:
    parts, grad, rstd, weight, centered, limit, sizes = case
    gradients = [torch.full_like(each, 7) for each in (grad, weight, weight)]
    others = (c_void_p * 4)(*(each.data_ptr() for each in (rstd, weight, *gradients[1:])))
    rest = (others, c_int64(rstd.numel()), c_int64(weight.numel()), centered, c_float(limit))

    def backward(p: Any) -> None:
        problem(gradients[0], NO_SIZES, *parts, lambda dx: kernels.norm_backward(p, dx, *rest))

    problem(grad, (*sizes, 0), *parts, backward)
    return gradients


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_norms_backward(kernels: Kernels, dtype: torch.dtype) -> None:
    rounding = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    for case in cuda_cases.norms(dtype):
        expected = cuda_cases.exact_norm_backward(case)
        for found, right in zip(norm_backward(kernels, case), expected, strict=True):
            assert (found - right).norm() <= rounding * right.norm()


def test_softmax_backward(kernels: Kernels) -> None:
    for parts, grad, sizes in cuda_cases.softmaxes():
        dx = torch.full_like(grad, 7.0)
        arguments = (c_void_p(dx.data_ptr()), *map(c_int64, dx.shape))
        problem(grad, (*sizes, 0), *parts, partial(_with, kernels.softmax_backward, *arguments))
        expected = fused_ops.softmax_backward(*parts, grad, *sizes)
        assert (dx - expected).norm() <= 1e-6 * expected.norm()


def cross_entropy_backward(kernels: Kernels, case: cuda_cases.CrossEntropy) -> Tensor:
    dx = torch.full((*case.target.shape, case.classes), 7.0)
    tensors = (case.target, case.surplus, case.weight, case.grad)
    addresses = (None if each is None else each.data_ptr() for each in tensors)
    sizes = (case.grad.numel() == 1, case.mean, -100, case.target.numel(), case.classes)
    task = ctypes.byref(CrossEntropyBackward(*addresses, *sizes, dx.data_ptr()))
    problem(dx, (*case.sizes, 0), *case.parts, lambda p: kernels.cross_entropy_backward(p, task))
    return dx


def test_cross_entropy_backward(kernels: Kernels) -> None:
    for case in cuda_cases.cross_entropies():
        expected = fused_ops.cross_entropy_backward(*case.arguments())
        assert cuda_cases.equal(cross_entropy_backward(kernels, case), expected)


def batch_norm_backward(kernels: Kernels, case: cuda_cases.BatchNorm) -> list[Tensor]:
    gradients = [torch.full_like(each, 7.0) for each in (case.grad, case.rstd, case.rstd)]
    sides = (case.grad, case.rstd, case.weight)
    addresses = (None if each is None else each.data_ptr() for each in sides)
    samples, channels, *rest = case.grad.shape
    sizes = (samples, channels, math.prod(rest))
    if case.last:
        sizes = (math.prod(case.grad.shape[:-1]), case.grad.shape[-1], 1)
    outs = (each.data_ptr() for each in gradients)
    task = ctypes.byref(BatchNormBackward(*addresses, *sizes, case.fixed, *outs))
    problem(case.grad, (*case.sizes, 0), *case.parts, lambda p: kernels.batch_norm_backward(p, task))
    return gradients


def test_batch_norm_backward(kernels: Kernels) -> None:
    for case in cuda_cases.batch_norms():
        case.assert_right(*batch_norm_backward(kernels, case))


def test_a_fixed_batch_norm_has_no_gaps(kernels: Kernels) -> None:
    """Its gradient does not depend on the input that was stored."""
    x, sizes = torch.full((6, 8, 9), math.nan), (4, 16, 64)
    parts = reference.quantize(x, *sizes, 0, True, torch.tensor([1]))
    grad, ones = randn(6, 8, 9), torch.ones(8)
    for fixed in (True, False):
        case = cuda_cases.BatchNorm(parts, grad, ones, None, False, fixed, sizes)
        dx, dw, db = batch_norm_backward(kernels, case)
        expected = fused_ops.batch_norm_backward(*case.arguments())
        assert cuda_cases.equal(dx, grad if fixed else x)
        assert cuda_cases.equal(dw, expected[1])
        assert (db - expected[2]).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.float64], ids=str)
def test_survivors(kernels: Kernels, dtype: torch.dtype) -> None:
    for x, count in cuda_cases.survivors(dtype):
        sizes = (c_int64(x.element_size()), c_int64(x.numel()), c_int64(count))
        memory = torch.full((reference.plane_bytes(x.numel()) + 1,), 0xAA, dtype=torch.uint8)
        bitmap, values, dense = memory[:-1], torch.full_like(x[:count], 7), torch.full_like(x, 7)
        addresses = (c_void_p(bitmap.data_ptr()), c_void_p(values.data_ptr()))
        kernels.sparsify(c_void_p(x.data_ptr()), *sizes, *addresses)
        expected = reference_codecs.sparsify(x, count)
        assert torch.equal(bitmap, expected[0])
        assert same_bytes(values, expected[1])
        assert memory[-1] == 0xAA
        kernels.densify(*addresses, *sizes, c_void_p(dense.data_ptr()))
        assert same_bytes(dense, reference_codecs.densify(bitmap, values, x.shape))


def take_a_target_that_is_no_class(kernels: Kernels) -> None:
    case = list(cuda_cases.cross_entropies())[-1]
    cross_entropy_backward(kernels, case._replace(target=torch.full_like(case.target, case.classes)))


def take_a_bitmap_of_too_many_bits(kernels: Kernels) -> None:
    bitmap, out, sizes = torch.tensor([7], dtype=torch.uint8), torch.zeros(8), map(c_int64, (4, 8, 2))
    addresses = (c_void_p(each.data_ptr()) for each in (bitmap, torch.ones(2)))
    kernels.densify(*addresses, *sizes, c_void_p(out.data_ptr()))


@pytest.mark.parametrize("take", [take_a_target_that_is_no_class, take_a_bitmap_of_too_many_bits])
def test_what_values_refuse_fails_an_assertion(kernels: Kernels, take: Callable[[Kernels], None]) -> None:
    """The host waits for no kernel, so it cannot raise."""
    code = f"import ctypes\nfrom {__name__} import *\n{take.__name__}(ctypes.CDLL({kernels._name!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGABRT
    assert "Assertion" in done.stderr


@given(st.data())
@settings(deadline=None, max_examples=40, derandomize=True)
def test_given_ranges(kernels: Kernels, data: st.DataObject) -> None:
    x, sizes, ranges, seed = data.draw(given_ranges())
    packed, ends = memory(x, sizes)
    problem(x, sizes, packed, ends, kernels.extents)
    assert same_numbers(ends, reference_codecs.extents(x, *sizes[2:]))
    number, stochastic = seed or 0, seed is not None
    key = ctypes.byref(c_int64(number))
    problem(x, sizes, packed, ranges, lambda p: kernels.quantize_within(p, stochastic, key))
    arguments = (x, ranges, *sizes, stochastic, torch.tensor([number]))
    assert same_bytes(packed, reference_codecs.quantize_within(*arguments))
