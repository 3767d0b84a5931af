"""A fixed twentieth of the sweep over PyTorch's operators and modules."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from benchmarks.sweeps.runner import RIGHT, SKIPPED, Case

EVERY = 20
SAMPLES = 4
NAMES = [
    "abs", "asin", "clamp", "div.no_rounding_mode", "floor", "masked_fill", "maximum", "native_batch_norm",
    "nn.functional.group_norm", "nn.functional.upsample_bilinear", "nn.functional.max_unpool3d",
    "nn.functional.triplet_margin_with_distance_loss", "dist", "sgn", "tensor_split",
    "polygamma.polygamma_n_0", "index_select", "chalf", "squeeze.multiple", "tril", "norm",
    "grid_sampler_3d", "repeat_interleave", "fft.rfft", "linalg.cond", "linalg.lu_solve", "special.ndtri",
    "nn.AdaptiveAvgPool1d", "nn.ELU", "nn.MSELoss", "nn.Hardswish", "nn.LSTMCell", "nn.ReflectionPad3d",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _warnings_of_plain_operators_are_not_ours() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def assert_right(name: str, *variants: str) -> None:
    from benchmarks.sweeps.operators import run  # PyTorch's databases take seconds to import

    for variant in variants:
        outcome = run(Case(name, variant), SAMPLES)
        assert outcome.result in (RIGHT, SKIPPED), f"{variant}: {outcome.cause}"


def test_an_operator_and_a_module_are_right() -> None:
    assert_right("abs", "sampled", "masked")
    assert_right("nn.Hardswish", "scaled")


@pytest.mark.slow("sweep")
@pytest.mark.parametrize("name", NAMES)
def test_operator_is_right(name: str) -> None:
    compiled = ["compiled"] if name in NAMES[::4] else []
    assert_right(name, "sampled", "scaled", "masked", *compiled)


def test_names_are_every_twentieth() -> None:
    from benchmarks.sweeps.databases import names

    assert names()[::EVERY] == NAMES
