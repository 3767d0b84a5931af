"""LayerSettings: what is valid, what is derived, and its JSON form."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesa_tune.policy.settings import (
    ALLOCATIONS,
    EXACT,
    KEYS,
    MESA_TAGS,
    MOST_FIXED_LEVELS,
    ROUNDINGS,
    STORES,
    TAGS,
    LayerSettings,
    check_value,
)

fractions = st.floats(0, 1, exclude_max=True)
groupings = st.one_of(
    st.integers(1, 4096).map(lambda size: {"group_size": size, "quant_groups": None}),
    st.integers(1, 64).map(lambda count: {"group_size": None, "quant_groups": count}),
)
sampled = st.builds(
    LayerSettings,
    level=st.integers(2, 256),
    group_size=st.integers(1, 4096),
    rounding=st.sampled_from(ROUNDINGS),
    rows=st.floats(0, 1, exclude_min=True),
    store=st.sampled_from(["quantize", "exact", "derive"]),
)
stores: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(dict, store=st.sampled_from(STORES), level=st.integers(2, MOST_FIXED_LEVELS)),
    st.builds(dict, store=st.sampled_from([s for s in STORES if s != "levels"]), level=st.integers(2, 256)),
)
settings = sampled | st.builds(
    lambda grouping, stored, **others: LayerSettings(**grouping, **stored, **others),
    groupings,
    stores,
    enable=st.booleans(),
    ema_decay=fractions,
    rounding=st.sampled_from(ROUNDINGS),
    drop=fractions,
    allocation=st.sampled_from(ALLOCATIONS),
    tile=st.integers(1, 64),
)


@pytest.mark.parametrize(
    ("level", "bits"), [(2, 1), (3, 2), (4, 2), (5, 3), (10, 4), (16, 4), (17, 5), (255, 8), (256, 8)]
)
def test_bits_hold_every_level(level: int, bits: int) -> None:
    assert LayerSettings(level=level).bits == bits


BAD: list[dict[str, Any]] = [
    *({"level": bad} for bad in (1, 257, 16.0, True)),
    *({"tile": bad} for bad in (0, True)),
    *({"group_size": bad} for bad in (0, 2**31)),
    {"group_size": None, "quant_groups": -3},
    *({"drop": bad} for bad in (1.0, float("nan"))),
    *({"rows": bad} for bad in (0, 1.5, float("nan"))),
    *({"ema_decay": bad} for bad in (-0.1, "0.9")),
    *({"rounding": "up"}, {"store": "zip"}, {"enable": 1}),
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_value_is_refused_with_key_and_value(bad: dict[str, Any]) -> None:
    key, value = list(bad.items())[-1]
    with pytest.raises(ValueError, match=f"{key} must be .*, but got {value!r}"):
        LayerSettings(**bad)


@pytest.mark.parametrize(("size", "count"), [(None, None), (256, 3)])
def test_exactly_one_grouping_is_set(size: int | None, count: int | None) -> None:
    with pytest.raises(ValueError, match="exactly one of group_size and quant_groups"):
        LayerSettings(group_size=size, quant_groups=count)


@pytest.mark.parametrize(
    "other",
    [
        *({"drop": 0.5}, {"ema_decay": 0.9}, {"allocation": "sample"}),
        *({"quant_groups": 3, "group_size": None}, {"store": "recompute"}, {"store": "offload"}),
    ],
    ids=lambda other: next(iter(other)),
)
def test_rows_go_only_with_bits_and_groups(other: dict[str, Any]) -> None:
    key, value = next(iter(other.items()))
    with pytest.raises(ValueError, match=f"`rows` 0.1 does not go with {key} {value}"):
        LayerSettings(rows=0.1, **other)
    LayerSettings(rows=1, **other)


def test_exact_is_disabled_or_stored_exactly() -> None:
    assert EXACT.exact
    assert LayerSettings(store="exact").exact
    assert not LayerSettings().exact
    assert not LayerSettings(store="exact", drop=0.9).exact, "its survivors are, the rest is gone"
    assert not LayerSettings(rows=0.1, store="exact").exact
    assert not LayerSettings(store="offload").exact


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (LayerSettings(level=4, drop=0.9, ema_decay=0.5, allocation="sample"), LayerSettings()),
        (LayerSettings(drop=0.9, store="exact"), LayerSettings(store="exact")),
        (LayerSettings(level=4, rows=0.1), LayerSettings()),
        (LayerSettings(rows=0.1, store="exact"), LayerSettings(store="exact")),
        # A string of its own, as read from a file.
        (LayerSettings(level=4, store="OFFLOAD".lower()), LayerSettings(level=4, store="offload")),
        (EXACT, EXACT),
    ],
    ids=lambda layer: layer.label,
)
def test_hooks_store_eight_bits_of_all_or_all_of_it(given: LayerSettings, stored: LayerSettings) -> None:
    assert given.hooked == stored


LABELS: dict[str, dict[str, Any]] = {
    "exact": {"store": "exact"},
    "exact drop 0.9": {"drop": 0.9, "store": "exact"},
    "exact rows 0.25": {"rows": 0.25, "store": "exact"},
    "4 bits / 256 rows 0.25": {"level": 16, "rows": 0.25},
    "offload": {"store": "offload"},
    "4 bits / 256": {"level": 16},
    "4 bits / 256 by sample": {"level": 16, "allocation": "sample"},
    "1 bit / 1024": {"level": 2, "group_size": 1024},
    "10 levels / 64": {"level": 10, "group_size": 64},
    "4 bits / 256 tile 8": {"level": 16, "tile": 8},
    "exact tile 8": {"store": "exact", "tile": 8},
    "8 bits / 3 groups": {"group_size": None, "quant_groups": 3},
    "8 bits / 256 nearest drop 0.5 derive": {"rounding": "nearest", "drop": 0.5, "store": "derive"},
}


def test_labels_are_short_and_tell_settings_apart() -> None:
    assert {label: LayerSettings(**given).label for label, given in LABELS.items()} == {x: x for x in LABELS}
    assert EXACT.label == "exact"


@given(settings)
def test_json_form_gives_the_same_settings_back(layer: LayerSettings) -> None:
    assert LayerSettings.from_dict(layer.to_dict()) == layer


def test_json_form_is_plain_and_small_and_of_known_keys() -> None:
    assert LayerSettings(level=16).to_dict() == {"enable": True, "level": 16, "group_size": 256}
    assert EXACT.to_dict() == {"enable": False}
    with pytest.raises(ValueError, match="unknown settings levl"):
        LayerSettings.from_dict({"levl": 16})


def test_every_key_has_a_check_and_every_tag_of_mesa_comes_first() -> None:
    for key in KEYS:
        with pytest.raises(ValueError, match=key):
            check_value(key, object())
    assert TAGS[: len(MESA_TAGS)] == MESA_TAGS
    assert len(set(TAGS)) == len(TAGS)


def test_only_groups_may_be_none() -> None:
    for key in ("enable", "level", "ema_decay", "rounding", "drop", "rows", "store"):
        with pytest.raises(ValueError, match=key):
            LayerSettings.from_dict({key: None})
