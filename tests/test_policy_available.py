"""Settings that this version cannot carry out are refused where the policy is applied."""

import pytest
from torch import nn

import mesa_tune as mt

OURS = "# mesa-tune policy 1\n"


@pytest.mark.parametrize("line", ["drop: 0.9", "store: derive", "store: recompute", "store: offload"])
def test_what_is_not_available_is_refused(line: str) -> None:
    policy = mt.Policy.parse(f"{OURS}on fc:\n    by_index: all\n    {line}\n")
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(mt.PolicyError, match=f"policy.txt:4: `{line}` is not available"):
        mt.convert(model, policy)
    with pytest.raises(mt.PolicyError, match=line), mt.compress_saved(policy):
        pass
    assert "forward" not in model[0].__dict__


def test_a_recomputed_module_is_refused() -> None:
    policy = mt.Policy.parse(f"{OURS}on module:\n    by_name: 0\n    store: recompute\n")
    with pytest.raises(mt.PolicyError, match="not available"):
        mt.convert(nn.Sequential(nn.Linear(4, 4)), policy)


def test_running_ranges_are_warned_of() -> None:
    policy = mt.Policy.parse("on fc:\n    by_index: all\n    enable: True\n", source="mesa.txt")
    with pytest.warns(UserWarning, match=r"mesa.txt: `ema_decay` has no effect"):
        mt.convert(nn.Sequential(nn.Linear(4, 4)), policy)
