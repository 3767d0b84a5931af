"""Options in remedies: of a command as typed, elsewhere as arguments of a function."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import mesa_tune as mt
from mesa_tune.errors import options, typed_options
from tests.synthetic import synthetic_profile


def test_options_are_those_of_where_the_error_is_raised() -> None:
    assert options("max_saved", budget="40%", batch_size=8) == 'max_saved=, budget="40%", batch_size=8'
    assert options(max_noise_ratio=math.inf) == "max_noise_ratio=math.inf"
    with typed_options():
        assert options("max_saved", budget="40%") == "--max-saved --budget 40%"
        assert options(max_noise_ratio=math.inf) == "--max-noise-ratio inf"
    assert options(budget=1000) == "budget=1000"


@pytest.mark.parametrize(
    "request_",
    [{"budget": "1%"}, {"budget": "90%", "max_saved": "1B"}, {"budget": "60%", "max_slowdown": 0.5}],
)
def test_what_a_caller_in_python_can_write(request_: dict[str, object]) -> None:
    profile = synthetic_profile()
    with pytest.raises(mt.BudgetError) as caught:
        mt.search_policy(profile, trials=0, **request_)  # type: ignore[arg-type]
    assert "--" not in str(caught.value)
    with typed_options(), pytest.raises(mt.BudgetError, match=" --"):
        mt.search_policy(profile, trials=0, **request_)  # type: ignore[arg-type]


def test_an_error_of_the_users_code_in_python_speaks_of_no_option(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("raise ValueError('no')")
    with pytest.raises(mt.WorkloadError, match="the model file raised ValueError: no") as caught:
        mt.Workload.load(tmp_path / "model.py")
    assert "--" not in str(caught.value)
