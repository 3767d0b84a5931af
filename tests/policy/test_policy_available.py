"""Settings that this version cannot carry out are refused where the policy is applied; all others pass."""

import warnings

import pytest
from torch import nn

import mesa_tune as mt

OURS = "# mesa-tune policy 1\n"
AVAILABLE = (
    "drop: 0.9",
    "rows: 0.1",
    "allocation: sample",
    "ema_decay: 0.9",
    "store: derive",
    "store: offload",
)
MESA = mt.Policy.parse("on fc:\n    by_index: all\n    enable: True\n", source="mesa.txt")


def _policy(line: str) -> mt.Policy:
    return mt.Policy.parse(f"{OURS}on fc:\n    by_index: all\n    {line}\n")


def test_a_layer_cannot_be_recomputed_by_itself() -> None:
    model = nn.Linear(4, 4)
    policy = _policy("store: recompute")
    with pytest.raises(mt.PolicyError, match=r"policy.txt:4: `store: recompute` is for whole modules"):
        mt.convert(model, policy)
    with pytest.raises(mt.PolicyError, match="on module:"), mt.compress_saved(policy):
        pass
    assert "forward" not in model.__dict__


def test_only_losses_and_modules_have_slices() -> None:
    model, policy = nn.Linear(4, 4), _policy("tile: 8")
    said = r"policy.txt:4: `tile: 8` is for losses and whole modules.*\n.*`on loss:`.*`on module:`"
    with pytest.raises(mt.PolicyError, match=said):
        mt.convert(model, policy)
    mt.convert(model, _policy("tile: 1"))
    mt.convert(model, mt.Policy.uniform(16, tile=8))


@pytest.mark.parametrize("policy", [*map(_policy, AVAILABLE), MESA], ids=[*AVAILABLE, "mesa"])
def test_every_other_key_is_carried_out_without_a_word(policy: mt.Policy) -> None:
    """Running ranges of Mesa's files, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = mt.convert(nn.Linear(4, 4), policy)
    assert "forward" in model.__dict__
