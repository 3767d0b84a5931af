"""Questions of the engine that few models ask: pieces, selective checkpoints, settings that became final."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import mesa_tune as mt
from mesa_tune.codecs import CODECS, Spec
from mesa_tune.conversion.model import conversion_of
from mesa_tune.engine import saved, storage
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.engine.storage import packing_of

SPEC = Spec("quantize", 8, 256, 64, 0, True, 0)


def test_pieces_make_up_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "LARGE", 1000)
    x = torch.randn(64, 30, 8)
    parts = CODECS["quantize"].encode(x, SPEC, torch.zeros(1, dtype=torch.int64))
    packed = SavedTensor(parts, packing_of(x, SPEC), SPEC)
    slices, rows = packed.slices(torch.float32), packed.rows(torch.float32, axes=2)
    assert slices is not None
    assert rows is not None
    pieces = [(part, values.clone()) for part, values in slices]
    assert len(pieces) == saved.PIECES
    assert torch.equal(torch.cat([values for _, values in pieces]), packed.whole())
    assert [part.start for part, _ in pieces] == [0, 16, 32, 48]
    assert torch.equal(torch.cat([run.clone() for _, run in rows]).view(x.shape), packed.whole())


def test_selective_checkpoints_are_recognized() -> None:
    assert not storage._is_selective()
    for context in create_selective_checkpoint_contexts([torch.ops.aten.mm.default]):
        with context:
            assert storage._is_selective()
    assert not storage._is_selective()


@pytest.mark.parametrize(("index", "changes"), [("all", False), ("1", True)])
def test_settings_are_final_when_they_do_not_change_again(index: str, changes: bool) -> None:
    policy = mt.Policy.parse(f"# mesa-tune policy 1\non gelu:\n    by_index: {index}\n    level: 16\n")
    model = mt.convert(nn.Sequential(nn.Linear(8, 8), _Gelus()), policy, min_elements=0)
    conversion = conversion_of(model)
    assert conversion is not None
    model(torch.randn(4, 8)).sum().backward()
    first = dict(conversion.specs)
    conversion.calls.calls["kept"] = ()
    assert conversion._make_final() == (first != conversion.specs) == changes
    assert ("kept" in conversion.calls.calls) == (not changes)


class _Gelus(nn.Module):
    """Two calls, whose indices are known when the first forward has ended."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(nn.functional.gelu(x))
