"""What sums over rows take on CUDA, beside what PyTorch 2.11 took on an H100."""

from __future__ import annotations

import pytest
import torch

import mesa_tune as mt
from mesa_tune.measure.cuda.allocator import MIB, AllocatorMeter
from mesa_tune.measure.cuda.reductions import H100, reduction_bytes
from tests.measure.models import DIGITS

SUM = torch.ops.aten.sum.dim_IntList


@pytest.mark.parametrize(
    ("shape", "dtype", "taken"),
    [((2048, 256), torch.float32, 4_194_304), ((6336, 1536), torch.bfloat16, 77_856_768)],
    ids=str,
)
def test_a_sum_of_rows_takes_what_a_gpu_took(shape: tuple[int, int], dtype: torch.dtype, taken: int) -> None:
    assert reduction_bytes(SUM, (torch.empty(shape, dtype=dtype, device="meta"), [0]), H100) == taken


@pytest.mark.parametrize(
    ("func", "arguments"),
    [
        (SUM, ((6336, 1536), [1])),
        (SUM, ((64, 1536), [0])),
        (SUM, ((0, 8), [0])),
        (torch.ops.aten.amax.default, ((6336, 1536), [0])),
    ],
    ids=["along rows", "few rows", "nothing", "no sum"],
)
def test_others_take_nothing(func: object, arguments: tuple[tuple[int, int], list[int]]) -> None:
    shape, dims = arguments
    assert reduction_bytes(func, (torch.empty(shape, device="meta"), dims), H100) == 0


def test_sparse_tensors_take_nothing() -> None:
    assert reduction_bytes(SUM, (torch.eye(6336).to_sparse(), [0]), H100) == 0


def test_partial_sums_are_allocated_and_freed() -> None:
    x = torch.ones(6336, 1536)
    with AllocatorMeter() as meter:
        meter.count_older([x])
        x.sum(0)
    assert meter.allocator.peak_allocated == pytest.approx(x.nbytes + 77_856_768, abs=MIB)
    assert meter.allocator.allocated < x.nbytes + MIB


MASKED = 2 * MIB
"""A masked copy of a gradient, which the 4 bits had when they were measured; rows are cleared since."""


@pytest.mark.parametrize(
    ("policy", "peak"), [(None, 58_940_000), (mt.Policy.uniform(level=16), 19_790_000 - MASKED)]
)
def test_the_peak_of_digits_on_cuda_is_that_of_a_gpu(policy: mt.Policy | None, peak: int) -> None:
    """Of an H100, without cuBLAS's workspaces; our kernels for the CPU alone must not count."""
    fit = mt.estimate(mt.Workload.load(DIGITS), policy, device="cuda")
    assert fit.peak_bytes == pytest.approx(peak, rel=0.02)
