"""Every twentieth model type of the sweep over transformers, in the variants that differ most."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from benchmarks.sweeps.architectures import heads_of, model_types
from benchmarks.sweeps.runner import RIGHT, SKIPPED, WRONG, Case
from benchmarks.sweeps.shrinking import TOO_LARGE
from benchmarks.sweeps.transformers_models import _with_every_layer, run

VARIANTS = ("16 plain", "derive bf16", "derive checkpoint", "16 reentrant")
SLOW = {"jamba", "falcon_mamba", "canine"}  # a step of a scan over time takes seconds
PICKED = [name for name in model_types() if heads_of(name) and name not in TOO_LARGE][::20]


@pytest.mark.filterwarnings("ignore")
def test_a_model_type_is_right_and_predicted() -> None:
    outcomes = [run(Case("vit", variant)) for variant in ("16 plain", "profile plain")]
    assert [(outcome.result, outcome.cause) for outcome in outcomes] == [(RIGHT, "")] * 2


@pytest.mark.slow("sweep")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in PICKED if name not in SLOW])
def test_a_model_type_is_right_in_every_variant(name: str) -> None:
    outcomes = {variant: run(Case(name, variant)) for variant in VARIANTS}
    wrong = {variant: outcome.cause for variant, outcome in outcomes.items() if outcome.result in WRONG}
    assert not wrong
    if outcomes["16 plain"].result == SKIPPED:
        pytest.skip(outcomes["16 plain"].cause)


class _Dropping(nn.Module):
    """Layers that are left out at random, as two attributes and a configuration say."""

    def __init__(self) -> None:
        super().__init__()
        self.layerdrop, self.encoder_layerdrop = 0.1, 0.2
        self.inner = nn.Module()
        self.inner.config, self.inner.layerdrop = None, 0.5  # type: ignore[assignment]
        self.config = SimpleNamespace(layerdrop=0.3, hidden_dropout=0.4)


def test_a_profiled_model_has_every_layer() -> None:
    model = _with_every_layer(_Dropping())
    assert isinstance(model, _Dropping)
    assert (model.layerdrop, model.encoder_layerdrop) == (0.0, 0.0)
    assert vars(model.config) == {"layerdrop": 0.0, "hidden_dropout": 0.4}
