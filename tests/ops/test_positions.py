"""Bitmaps as Elias-Fano codes: every bitmap comes back, in the bytes that are promised."""

from __future__ import annotations

import pytest
import torch

from mesa_tune import ops
from mesa_tune.ops.codecs import RAW
from mesa_tune.ops.reference import positions
from tests.ops.test_ops_kernels import needs_library


def test_a_small_code_by_hand() -> None:
    """Positions 2, 3 and 9 below 12, 2 low bits each: low 2, 3, 1; high 0, 0, 2, so bits 0, 1 and 4."""
    bitmap = torch.tensor([0b00001100, 0b10], dtype=torch.uint8)
    code = RAW.pack_positions(bitmap, 12, 3, 2)
    assert code.tolist() == [0b110, 0b011, 0b010011]


@pytest.mark.parametrize(
    ("numel", "low"), [(1, 0), (1, 3), (7, 1), (8, 0), (9, 5), (64, 3), (1000, 0), (1000, 5), (4097, 1)]
)
def test_bitmaps_come_back(numel: int, low: int) -> None:
    for count in {0, 1, min(numel, 3), numel // 20, numel // 5, numel}:
        mask = torch.zeros(numel, dtype=torch.bool)
        mask[torch.randperm(numel)[:count]] = True
        bitmap = ops.pack_bits(mask)
        code = RAW.pack_positions(bitmap, numel, count, low)
        assert torch.equal(code, positions.pack_positions(bitmap, numel, count, low))
        assert code.numel() == positions.position_bytes(numel, count, low)
        for unpack in (RAW.unpack_positions, positions.unpack_positions):
            assert torch.equal(unpack(code, numel, count, low), bitmap)


@needs_library
def test_codes_of_other_counts_are_refused() -> None:
    bitmap = torch.tensor([0b111], dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="expected a bitmap with 2 bits set, but got 3"):
        RAW.pack_positions(bitmap, 8, 2, 1)
    code = RAW.pack_positions(bitmap, 8, 3, 1)
    with pytest.raises(RuntimeError, match="expected the code of 3 positions, but got 0"):
        RAW.unpack_positions(torch.zeros_like(code), 8, 3, 1)
