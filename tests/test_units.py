from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesa_tune.errors import BudgetError
from mesa_tune.units import format_bytes, format_time, parse_bytes, shorten_apart, unbroken
from tests.builders import known


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("6GB", 6 * 10**9), ("6 gb", 6 * 10**9), ("6GiB", 6 * 2**30), ("1.5MiB", 3 * 2**19)),
        *(("500kB", 500_000), ("2TB", 2 * 10**12), ("1234", 1234), ("123B", 123)),
        *(("1e9", 10**9), (4096, 4096)),
    ],
)
def test_budget_in_bytes(text: str | int, expected: int) -> None:
    assert parse_bytes(text).bytes == expected
    assert parse_bytes(text).of(baseline_peak=7) == expected


def test_budget_as_a_share_of_the_baseline() -> None:
    budget = parse_bytes("40%")
    assert budget.bytes is None
    assert budget.of(baseline_peak=1000) == 400


@pytest.mark.parametrize(
    "text", ["banana", "", "6XB", "0", "0%", "0GB", "-1GB", "-40%", "nan", "inf", "1e999", "GB", "6GB 5"]
)
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(BudgetError) as raised:
        parse_bytes(text)
    message = str(raised.value)
    assert repr(text) in message
    assert "6GB" in message.splitlines()[-1]
    assert len(message.splitlines()) <= 3


@pytest.mark.parametrize(
    ("number", "meant"),
    [("0.6", "6GB or 60%"), (0.6, "6GB or 60%"), (6, "6GB or 6%"), ("24", "24GB or 24%"), ("500", "500GB")],
)
def test_a_small_number_without_a_unit_is_refused(number: str | float, meant: str) -> None:
    with pytest.raises(BudgetError, match=f"in bytes\nwrite it like {meant}$"):
        parse_bytes(number)


@given(st.integers(1000, 10**15))
def test_a_number_of_bytes_is_itself(count: int) -> None:
    assert parse_bytes(str(count)).bytes == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_499, "999 kB"), (999_600, "1.00 MB")),
        *((41_200_000, "41.2 MB"), (-5_712_000_000, "-5.71 GB"), (1234 * 10**12, "1234 TB")),
    ],
)
def test_bytes_have_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(1, 10**14))
def test_written_bytes_are_within_half_a_percent(count: int) -> None:
    amount, unit = format_bytes(count).split()
    read = known(parse_bytes(amount + unit).bytes)
    assert abs(read - count) <= 0.005 * count


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((8.12e-4, "812 µs"), (0.0412, "41.2 ms"), (0.9996, "1.00 s"), (9.87, "9.87 s")),
        *((99.9, "99.9 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")),
    ],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_numbers_and_their_units_stay_on_one_line() -> None:
    assert unbroken("4.18 MB, 25 % of 3 layers") == "4.18\xa0MB, 25\xa0% of 3 layers"


def test_shortened_names_stay_apart() -> None:
    names = [f"transformer.h.{i}.attn.scaled_dot_product_attention.0" for i in range(12)]
    cut = shorten_apart([*names, "head"], 44)
    assert len(set(cut)) == 13
    assert max(map(len, cut)) == 44
    assert cut[-1] == "head"
    inner = [f"encoder.layers.{i}.feed_forward_network.dense_out.{i}.addmm.0" for i in range(3)]
    assert all(text.startswith("encoder.layer…") for text in shorten_apart(inner, 40))
