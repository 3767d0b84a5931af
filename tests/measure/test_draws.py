"""Batches of unequal lengths: the longest draw is traced, and a note says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.measure.draws import DRAWS, longest_batch
from tests.builders import workload

pytestmark = pytest.mark.usefixtures("without_variants")


def tagger() -> nn.Module:
    return nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128))


def tagged(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"]).masked_fill(~batch["attention_mask"].bool().unsqueeze(-1), 0.0)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def padded(n: int) -> dict[str, Tensor]:
    """Token sequences of random lengths, padded to the longest, as a tokenizer returns them."""
    lengths = torch.randint(40, 120, (n,))
    longest = int(lengths.max())
    tokens = torch.randint(128, (n, longest))
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def ragged(batch: Callable[[int], Any] = padded) -> mt.Workload:
    return workload(tagger, batch, tagged, batch_size=4)


def length(batch: dict[str, Tensor]) -> int:
    return batch["input_ids"].shape[1]


def test_bytes_are_those_of_the_longest_draw_and_others_are_told() -> None:
    work = ragged()
    lengths = [length(work.make_batch(draw=draw)) for draw in range(DRAWS)]
    longest = lengths.index(max(lengths))
    assert longest  # or the first draw would do
    made = mt.profile(work, options=[])
    batch = work.make_batch(draw=longest)
    cut = ragged(batch=lambda n: {name: tensor[:n] for name, tensor in batch.items()})
    alone = mt.profile(cut, options=[])
    assert (made.peak_bytes, made.saved_bytes) == (alone.peak_bytes, alone.saved_bytes)
    assert made.notes[0] == (
        f"batches differ in length: the largest tensor of the first 8 draws is 4 × {min(lengths)} to "
        f"4 × {max(lengths)}; draw {longest}, the longest, was traced"
    )
    assert alone.notes == ()
    check = mt.verify(work, mt.Policy.parse(""), steps=1, seeds=1)
    assert check.baseline.peak_bytes == made.peak_bytes
    draw = longest_batch(work).draw
    same = length(work.make_batch(2, draw=draw)) == length(work.make_batch(draw=draw))
    note = f"draw {draw} of 2 samples has other lengths: bytes at other batch sizes are estimates"
    assert (note in made.notes) is not same


def test_batches_of_one_length_need_no_note() -> None:
    longest = longest_batch(ragged(batch=lambda n: {"input_ids": torch.randint(128, (n, 8))}))
    assert (longest.draw, longest.differ, longest.notes) == (0, False, ())


GENERATOR = torch.Generator()
REPRODUCIBLE = {
    "random numbers": lambda n: torch.randn(n, 4),
    "NaN": lambda n: torch.full((n, 4), torch.nan),
    "sparse": lambda n: torch.eye(n).to_sparse(),
    "not contiguous": lambda n: torch.randn(4, n).T,
    "empty": lambda n: (torch.empty(0), torch.tensor(1.0)),
    "its own generator, seeded": lambda n: torch.randn(n, 4, generator=torch.Generator().manual_seed(1)),
    "no tensors": lambda n: list(range(n)),
}


@pytest.mark.parametrize("batch", REPRODUCIBLE.values(), ids=list(REPRODUCIBLE))
def test_equal_batches_are_found_equal(batch: Any) -> None:
    assert longest_batch(ragged(batch=batch)).notes == ()


IRREPRODUCIBLE = {
    "its own generator": lambda n: {"x": torch.randn(n, 4, generator=GENERATOR), "y": torch.zeros(n)},
    "another length": lambda n: torch.zeros(n, int(torch.randint(1000000, (), generator=GENERATOR)) % 1000),
}


@pytest.mark.parametrize("name", IRREPRODUCIBLE)
def test_a_batch_that_cannot_be_made_again_is_told(name: str) -> None:
    with pytest.warns(UserWarning, match="makes another batch under the same seed") as given:
        notes = longest_batch(ragged(batch=IRREPRODUCIBLE[name])).notes
    assert str(given[0].message) == notes[0]
    line = IRREPRODUCIBLE[name].__code__.co_firstlineno
    assert notes[0].startswith(f"{Path(__file__).relative_to(Path.cwd())}:{line}: batch() ")
    assert "\n" not in notes[0]
