"""The timeline: which bytes live when, under any policy and at any batch size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesa_tune import ops
from mesa_tune.errors import BudgetError
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.prediction import Peak
from mesa_tune.profiles.timeline.memory_model import SavedSpan, Slot, Timeline, Work
from tests.synthetic import synthetic_profile

FOUR = LayerSettings(level=16)
EIGHT = LayerSettings(level=256)
BIG = 8192


def timeline(*kept: SavedSpan, hooked: tuple[str, ...] = (), static: tuple[int, int] = (100, 80)) -> Timeline:
    """Four slots (forward a b, backward b a), working memory 10 (exact) or 30 (packed), batches 8 and 4."""
    slots = [
        Slot(layer, phase, Work.of((10, 5), (30, 15)))
        for layer, phase in (("a", "forward"), ("b", "forward"), ("b", "backward"), ("a", "backward"))
    ]
    return Timeline((8, 4), {"weights": static}, tuple(slots), kept, hooked)


def plain(*layers: str, first: int = 0, last: int = 3) -> SavedSpan:
    return SavedSpan("plain", layers, (4 * BIG, 2 * BIG), 1, first, last)


def coded(*layers: str, size: tuple[int, int] = (BIG, BIG // 2)) -> SavedSpan:
    return SavedSpan("coded", layers, size, 4, 0, 3)


def test_live_adds_static_work_and_kept() -> None:
    traced = timeline(plain("a", first=0, last=2), SavedSpan("always", (), (7, 7), 1, 1, 1))
    assert traced.live({}).tolist() == [110 + 4 * BIG, 117 + 4 * BIG, 110 + 4 * BIG, 110]
    assert traced.peak_bytes({}) == 117 + 4 * BIG
    assert traced.saved_bytes({}) == 4 * BIG


def test_only_slots_of_a_compressed_layer_have_its_temporaries() -> None:
    assert timeline().live({"a": FOUR}).tolist() == [130, 110, 110, 130]


def test_a_plain_storage_stays_until_every_keeper_compresses() -> None:
    traced = timeline(plain("a", "b"))
    assert traced.saved_bytes({"a": FOUR}) == 4 * BIG
    assert traced.saved_bytes({"a": FOUR, "b": EXACT}) == 4 * BIG
    assert traced.saved_bytes({"a": FOUR, "b": EIGHT}) == 0


def test_sharers_pay_once_for_equal_settings_and_each_for_unequal_ones() -> None:
    traced = timeline(coded("a", "b"))
    four, eight = ops.packed_bytes(BIG, 4), ops.packed_bytes(BIG, 8)
    assert traced.saved_bytes({"a": FOUR}) == four
    assert traced.saved_bytes({"a": FOUR, "b": FOUR}) == four
    assert traced.saved_bytes({"a": FOUR, "b": EIGHT}) == four + eight


def test_quant_groups_count_their_own_ranges() -> None:
    settings = LayerSettings(level=16, group_size=None, quant_groups=2)
    assert timeline(coded("a")).saved_bytes({"a": settings}) == ops.packed_bytes(BIG, 4, quant_groups=2)


def test_what_a_codec_keeps_from_step_to_step_is_alive_in_every_slot() -> None:
    running = LayerSettings(level=16, ema_decay=0.9)
    packed, kept = ops.packed_bytes(BIG, 4), 8 * -(-BIG // 256) + 4
    traced = timeline(SavedSpan("coded", ("a",), (BIG, BIG), 4, 1, 2))
    without = [130, 110 + packed, 110 + packed, 130]
    assert traced.live({"a": running}).tolist() == [size + kept for size in without]
    assert traced.saved_bytes({"a": running}) == packed + kept
    assert sum(traced.at().under({"a": running}).peak.bytes.values()) == traced.peak_bytes({"a": running})


@pytest.mark.parametrize(("elements", "expected"), [(4096, 4 * 4096), (4097, ops.packed_bytes(4097, 4))])
def test_small_tensors_beside_large_ones_stay_raw(elements: int, expected: int) -> None:
    both = timeline(coded("a"), coded("a", size=(elements, elements)))
    assert both.saved_bytes({"a": FOUR}) == ops.packed_bytes(BIG, 4) + expected


def small(extent: int, view: int, whole: int | None = None) -> Timeline:
    """A tensor of 4096 elements in 100 kB, and a mask, kept by a call of `extent` elements."""
    stored = replace(coded("a", size=(4096, 4096)), extents=((extent, extent),))
    return timeline(
        stored if whole is None else replace(stored, whole=(whole, whole)),
        SavedSpan("side", ("a",), (64, 64), 1, 0, 3, extents=((extent, extent),)),
        SavedSpan("plain", ("a",), (100_000, 100_000), 4, 0, 3, extents=((view, view),)),
    )


def test_a_call_that_is_too_small_keeps_what_pytorch_keeps() -> None:
    traced = small(4096, 4096)
    assert traced.at().small == {"a"}
    assert traced.saved_bytes({"a": FOUR}) == traced.saved_bytes({}) == 100_000


@pytest.mark.parametrize(
    ("view", "whole", "kept"),
    [(BIG, None, 4 * 4096), (BIG, 50_000, 50_000), (4096, 0, 100_000)],
    ids=["copied", "view", "view of what PyTorch keeps"],
)
def test_a_large_call_keeps_its_small_tensors_as_they_are(view: int, whole: int | None, kept: int) -> None:
    traced = small(BIG, view, whole)
    assert traced.at().small == frozenset()
    assert traced.saved_bytes({"a": FOUR}) == 64 + kept
    assert traced.saved_bytes({}) == 100_000


def test_of_a_layers_calls_the_small_ones_keep_what_pytorch_keeps() -> None:
    both = timeline(
        SavedSpan("side", ("a",), (1024, 512), 1, 0, 3, extents=((BIG, BIG // 2),)),
        SavedSpan("plain", ("a",), (4 * BIG, 2 * BIG), 4, 0, 3, extents=((BIG, BIG // 2),)),
        SavedSpan("side", ("a",), (512, 256), 1, 0, 3, extents=((4096, 2048),)),
        SavedSpan("plain", ("a",), (16384, 8192), 4, 0, 3, extents=((4096, 2048),)),
    )
    assert both.saved_bytes({"a": FOUR}) == 1024 + 16384
    assert both.saved_bytes({"a": FOUR}, 16) == 2 * (1024 + 512)
    assert both.saved_bytes({"a": FOUR}, 4) == both.saved_bytes({}, 4) == 2 * BIG + 8192


def test_side_things_live_with_their_compressed_layer() -> None:
    traced = timeline(SavedSpan("side", ("a",), (64, 32), 1, 0, 3))
    assert traced.saved_bytes({}) == 0
    assert traced.saved_bytes({"a": FOUR}) == 64


def test_hooked_layers_never_store_fewer_than_eight_bits() -> None:
    traced = timeline(coded("a"), hooked=("a",))
    assert traced.saved_bytes({"a": LayerSettings(level=2)}) == ops.packed_bytes(BIG, 8)


@pytest.mark.parametrize(
    ("first", "last", "saved"),
    [(0, 1, False), (0, 2, True), (1, 3, True), (2, 3, False)],
    ids=["dies-in-forward", "spans", "late", "born-in-backward"],
)
def test_saved_means_alive_between_forward_and_backward(first: int, last: int, saved: bool) -> None:
    assert bool(timeline(plain("a", first=first, last=last)).saved_bytes({})) is saved


@pytest.mark.parametrize(("batch", "static"), [(8, 100), (4, 80), (6, 90), (16, 140), (1, 65)], ids=str)
def test_other_batch_sizes_lie_on_the_line(batch: int, static: int) -> None:
    traced = timeline(plain("a"))
    assert traced.at(batch).static == static
    assert traced.saved_bytes({}, batch) == BIG * batch // 2
    assert timeline(static=(100, 0)).at(1).static == 0  # never below zero


def test_packed_bytes_follow_the_element_count_not_the_bytes() -> None:
    assert timeline(coded("a")).saved_bytes({"a": FOUR}, 9) == ops.packed_bytes(BIG // 8 * 9, 4)


def test_one_traced_size_cannot_be_stretched() -> None:
    single = replace(timeline(), batch_sizes=(8, 8), static={"weights": (100, 100)})
    assert single.at(8).static == 100
    with pytest.raises(BudgetError, match=r"batch size 16.*\n.*batch_size=16"):
        single.live({}, 16)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        SavedSpan("odd", (), (1, 1), 1, 0, 0)


def test_the_dictionary_form_is_the_same_timeline() -> None:
    original = synthetic_profile().timeline
    assert Timeline.from_dict(original.to_dict()) == original


def test_the_peak_says_when_it_is_and_of_what() -> None:
    traced = timeline(plain("a", first=0, last=2), SavedSpan("always", (), (7, 7), 1, 1, 1))
    peak = traced.at().under({}).peak
    assert (peak.layer, peak.phase) == ("b", "forward")
    parts = {"weights": 100, "saved tensors": 4 * BIG + 7, "working memory": 10}
    assert {kind: count for kind, count in peak.bytes.items() if count} == parts
    assert peak.text == "in the forward of b: saved tensors 32.8 kB, weights 100 B, working memory 10 B"
    compressed = traced.at().under({"a": FOUR}).peak
    assert (compressed.layer, compressed.phase, compressed.bytes["working memory"]) == ("a", "forward", 30)
    assert Peak.from_dict(peak.to_dict()) == peak


def derivable(*layers: str) -> SavedSpan:
    return SavedSpan("coded", layers, (BIG, BIG // 2), 4, 0, 3, sources=("a",))


DERIVE = replace(FOUR, store="derive")


@pytest.mark.parametrize(
    ("assignment", "copies"),
    [
        ({"a": FOUR, "b": DERIVE}, 0),
        ({"a": DERIVE, "b": DERIVE}, 0),
        ({"a": FOUR, "b": FOUR}, 1),
        ({"b": DERIVE}, 1),
        ({"a": EXACT, "b": DERIVE}, 1),
    ],
    ids=["derived", "all-ask", "nobody-asks", "no-producer", "exact-producer"],
)
def test_what_is_derived_costs_nothing(assignment: dict[str, LayerSettings], copies: int) -> None:
    assert timeline(derivable("b")).saved_bytes(assignment) == copies * ops.packed_bytes(BIG, 4)


def test_producers_that_keep_their_output_and_sharers_that_do_not_derive_pay() -> None:
    assert timeline(derivable("a", "b")).saved_bytes({"a": DERIVE, "b": DERIVE}) == ops.packed_bytes(BIG, 4)
    shared = timeline(derivable("b", "c"), coded("a"))
    four = ops.packed_bytes(BIG, 4)
    assert shared.saved_bytes({"a": FOUR, "b": DERIVE, "c": FOUR}) == 2 * four


def test_layers_that_derive_and_their_producers_have_temporaries_of_their_own() -> None:
    traced = timeline(derivable("b"), coded("a"))
    slots = tuple(replace(slot, once=Work.of((10, 5), (30, 15), (50, 25))) for slot in traced.slots)
    traced = replace(traced, slots=slots)
    assert traced.at().under({"a": FOUR, "b": DERIVE}).work.tolist() == [50] * 4
    assert traced.at().under({"a": FOUR, "b": FOUR}).work.tolist() == [30] * 4
    assert traced.at().under({"b": DERIVE}).work.tolist() == [10, 30, 30, 10]


def test_small_tensors_are_not_derived() -> None:
    both = timeline(coded("a"), coded("b"), replace(derivable("b"), size=(4096, 4096)))
    assert both.saved_bytes({"a": FOUR, "b": DERIVE}) == 2 * ops.packed_bytes(BIG, 4) + 4 * 4096
    producer = timeline(derivable("b"), coded("a", size=(4096, 4096)))  # stores exactly
    assert producer.saved_bytes({"a": FOUR, "b": DERIVE}) == ops.packed_bytes(BIG, 4)


def test_an_activation_derives_its_input_only_for_others() -> None:
    inner = derivable("b")
    outer = replace(derivable("c"), first=1, sources=("a", "b"))
    both = replace(timeline(coded("a"), inner, outer), serving=("b",))
    four = ops.packed_bytes(BIG, 4)
    assert both.saved_bytes({"a": FOUR, "b": DERIVE, "c": DERIVE}) == four
    assert both.saved_bytes({"a": FOUR, "b": DERIVE, "c": FOUR}) == 3 * four
    assert replace(both, serving=()).saved_bytes({"a": FOUR, "b": DERIVE, "c": FOUR}) == 2 * four


def test_an_activation_that_serves_in_an_earlier_call_derives_in_every_call() -> None:
    served = replace(derivable("c"), sources=("b",))
    later = replace(derivable("b"), first=1)
    twice = replace(timeline(coded("a"), coded("b"), served, later), serving=("b",))
    four = ops.packed_bytes(BIG, 4)
    assert twice.saved_bytes({"a": FOUR, "b": DERIVE, "c": DERIVE}) == 2 * four
    assert twice.saved_bytes({"a": FOUR, "b": DERIVE, "c": FOUR}) == 4 * four
