"""Norms that models compose by hand obey Rule 7: rows of tiny variance do not amplify the error."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import mesa_tune as mt
from mesa_tune.codecs import Spec
from mesa_tune.engine.call import Call
from mesa_tune.formulas.norms.composed import aligned, is_repeated
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.policy import Policy
from tests.builders import mean_error, workload
from tests.conformance.running import relative_error, step
from tests.functional_cases import EIGHT, Bare
from tests.step_memory import Composed

pytestmark = pytest.mark.usefixtures("without_variants")


def divided_norm(width: int) -> nn.Module:
    """A layer norm as the first transformers wrote it."""

    def forward(model: Any, x: Tensor) -> Any:
        centered = x - x.mean(-1, keepdim=True)
        deviation = torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-6)
        return model.weight * (centered / deviation)

    return Composed(forward, weight=nn.Parameter(torch.ones(width)))


def lifted(norm: nn.Module, tokens: int, width: int) -> nn.Module:
    """The norm of an activation, and something after it."""
    shift, head = nn.Parameter(torch.zeros(tokens, width)), nn.Linear(width, 16)
    return Composed(lambda m, x: m.head(m.norm(x + m.shift)), shift=shift, norm=norm, head=head)


def _inputs(width: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(4, 24, width)
    token, uneven = x.clone(), x.clone()
    token[:, 0] = 0
    uneven[:, ::2] *= 1e-3
    return {"normal": x, "class token at zero": token, "uneven rows": uneven, "small": x * 1e-3}


@pytest.mark.parametrize(
    ("norm", "width"),
    [
        *((LlamaRMSNorm, width) for width in (32, 100, 256, 127)),
        *((T5LayerNorm, 100), (divided_norm, 32), (divided_norm, 127), (nn.RMSNorm, 256), (nn.RMSNorm, 127)),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_error_is_not_amplified(norm: Callable[[int], nn.Module], width: int) -> None:
    torch.manual_seed(0)
    plain = lifted(norm(width), 24, width)
    for name, x in _inputs(width).items():
        right = step(plain, x).gradients
        for level, bound in ((16, 0.1), (4, 2.0)):
            coded = mt.convert(copy.deepcopy(plain), Policy.uniform(level), min_elements=0, seed=1)
            assert torch.equal(coded(x), plain(x))
            error = relative_error(step(coded, x).gradients, right)
            assert error < bound, f"{error:.2g} at {level} levels for inputs: {name}"


def test_prices_are_those_of_groups_that_end_with_rows() -> None:
    width = 100
    x = _inputs(width)["uneven rows"]
    factors = torch.randn(16, generator=torch.Generator().manual_seed(0))
    work = workload(
        lambda: lifted(LlamaRMSNorm(width), 24, width),
        lambda _: torch.cat([x] * 4),
        lambda model, batch: (model(batch) * factors).sum(),
        batch_size=16,
    )
    policy = Policy.uniform(16)
    predicted = mt.profile(work, options=[mt.LayerSettings(level=16)]).predict(policy).gradient_error
    found = mean_error(JointError(work), policy, [(0, seed) for seed in range(8)])
    assert predicted == pytest.approx(found, rel=0.3)


def test_groups_end_where_rows_do() -> None:
    def group_size(x: Tensor, spec: Spec) -> int:
        call = Call("layer", spec, Bare(), torch.square, [x], {})
        return aligned(call, x).spec.group_size

    assert group_size(torch.zeros(8, 512), EIGHT) == 256
    assert group_size(torch.zeros(8, 320), EIGHT) == 160
    assert group_size(torch.zeros(8, 32), EIGHT) == 32
    assert group_size(torch.tensor(1.0), EIGHT._replace(group_size=1)) == 1
    assert group_size(torch.zeros(8, 32), EIGHT._replace(group_size=0, quant_groups=4)) == 0


def test_what_counts_as_a_statistic() -> None:
    x = torch.zeros(4, 24, 32)
    assert is_repeated(torch.zeros(4, 24, 1), x)
    assert not is_repeated(torch.zeros(4, 24, 32), x)
    assert not is_repeated(torch.zeros(32), x)
