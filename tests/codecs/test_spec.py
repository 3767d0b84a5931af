"""What settings become: the spec, and what it leaves out for hooks, for copies and within rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesa_tune.codecs import CODECS, Spec
from mesa_tune.codecs.mixed import _gain
from mesa_tune.codecs.spec import codec_of, fitting_size, overruled
from mesa_tune.engine.storage import packing_of
from mesa_tune.policy.settings import LayerSettings

FOUR = Spec("quantize", 4, 16, 256, 0, True, 0)


@pytest.mark.parametrize("change", [{"derive": True}, {"exposes": True}, {"row": 32}, {}], ids=str)
def test_alone_it_says_nothing_of_other_layers(change: dict[str, Any]) -> None:
    assert FOUR._replace(**change).alone == FOUR


def test_hooks_store_in_256_levels_and_nothing_else() -> None:
    odd = FOUR._replace(codec="running", ema_decay=0.9)
    assert odd.hooked == FOUR._replace(bits=8, levels=256)
    assert FOUR._replace(codec="drop", drop=0.5).hooked == FOUR._replace(bits=8, levels=256)
    assert FOUR._replace(codec="drop", drop=0.5, exact=True).hooked is None
    assert FOUR._replace(codec="offload", exact=True).hooked is not None


def test_rows_lie_along_an_axis_or_are_all_stored() -> None:
    half = FOUR._replace(codec="rows", rows=0.5)
    assert half.along(-1) == half._replace(axis=-1)
    assert half.along(-1).alone == half._replace(axis=-1), "other axes have other rows"
    assert half.along(-3).along(0) == FOUR
    assert half._replace(exact=True).along(0) == Spec.plain(0)
    assert FOUR.along(-1).alone == FOUR
    assert half.hooked == FOUR._replace(bits=8, levels=256)


@pytest.mark.parametrize(
    ("settings", "codec", "without_effect"),
    [
        ({}, "quantize", []),
        ({"drop": 0.5}, "drop", []),
        ({"rows": 0.5}, "rows", []),
        ({"rows": 0.5, "store": "exact"}, "rows", []),
        ({"ema_decay": 0.9}, "running", []),
        ({"allocation": "sample"}, "mixed", []),
        ({"drop": 0.5, "ema_decay": 0.9}, "drop", ["ema_decay"]),
        ({"allocation": "sample", "ema_decay": 0.9}, "mixed", ["ema_decay"]),
        ({"drop": 0.5, "allocation": "sample", "ema_decay": 0.9}, "drop", ["allocation", "ema_decay"]),
        ({"store": "offload", "drop": 0.5}, "offload", ["drop"]),
    ],
)
def test_one_codec_is_chosen_and_the_rest_named(
    settings: dict[str, Any], codec: str, without_effect: list[str]
) -> None:
    asked = LayerSettings(**settings)
    assert codec_of(asked) == codec
    assert overruled(asked) == without_effect


@pytest.mark.parametrize(
    ("size", "row", "fits"), [(256, 0, 256), (0, 48, 0), (256, 512, 256), (256, 48, 48), (64, 96, 48)]
)
def test_groups_fit_into_rows(size: int, row: int, fits: int) -> None:
    assert fitting_size(size, row) == fits


def test_survivors_are_in_as_many_groups_as_asked() -> None:
    spec = FOUR._replace(codec="drop", drop=0.9, group_size=0, quant_groups=4)
    x = torch.randn(10_000)
    parts = CODECS["drop"].encode(x, spec, torch.zeros(1, dtype=torch.int64))
    ranges = [part for part in parts if part.is_floating_point()]
    assert [len(part) for part in ranges] == [4]


def test_another_bit_gains_what_it_takes_from_the_error() -> None:
    for bits in (1, 3):
        low, high = (1 / (2**each - 1) ** 2 for each in (bits, bits + 1))
        assert _gain(5.0, 10, bits) == pytest.approx(0.5 * (low - high))


def test_a_packing_says_how_many_parts_there_are() -> None:
    x = torch.randn(100, 100)
    packing = packing_of(x, FOUR)
    assert len(CODECS["quantize"].encode(x, FOUR, torch.zeros(1, dtype=torch.int64))) == packing.parts
    assert packing_of(x.long(), FOUR).parts == 1
