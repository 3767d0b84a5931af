"""Traced code stores and restores as eager code does: element by element, rounding included."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import mesa_tune as mt
from tests.step_memory import Composed


def attention(causal: bool) -> nn.Module:
    """Attention whose queries, keys and values are dense, but not contiguous."""

    def forward(model: Any, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (3, 16)).transpose(1, 2) for layer in model.projections)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)

    return Composed(forward, projections=nn.ModuleList(nn.Linear(40, 48) for _ in range(3)))


def gradients(model: nn.Module, function: object, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = function(x)  # type: ignore[operator]
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    "causal", [False, pytest.param(True, marks=pytest.mark.slow("compile"))], ids=["all", "causal"]
)
def test_attention_has_the_gradients_of_eager_code(causal: bool) -> None:
    torch.compiler.reset()
    plain = attention(causal)
    eager, traced = (
        mt.convert(copy.deepcopy(plain), mt.Policy.uniform(level=4), seed=0, min_elements=0) for _ in range(2)
    )
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 21, 40)
    found, wanted = gradients(traced, compiled, x), gradients(eager, eager, x)
    exact = gradients(plain, plain, x)
    for each, expected, without in zip(found, wanted, exact, strict=True):
        # With 2 bits the rounding shows: other noise would differ by as much as the error itself.
        assert (each - expected).norm() < 1e-4 * expected.norm()
        if expected.dim() > 1:
            assert (expected - without).norm() > 0.02 * without.norm()


def test_rows_of_zeros_meet_gradients_of_any_size() -> None:
    torch.compiler.reset()
    model = mt.convert(nn.Linear(40, 8), mt.Policy.uniform(level=4), seed=0, min_elements=0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 40).index_fill_(0, torch.tensor([3, 9]), 0).requires_grad_()
    compiled(x).backward(torch.ones(16, 8).index_fill_(0, torch.tensor([3, 9]), 1e20))
    assert isinstance(model.weight.grad, Tensor)
    assert model.weight.grad.abs().max() < 1e3


def test_the_compiled_graph_masks_no_gradient() -> None:
    """Rows of zeros are written while their tensor is decoded: no copy of the gradient is made."""
    torch.compiler.reset()
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    model = mt.convert(nn.Linear(40, 8), mt.Policy.uniform(level=4), min_elements=0)
    compiler = aot_autograd(fw_compiler=backend, bw_compiler=backend)
    torch.compile(model, backend=compiler)(torch.randn(16, 40, requires_grad=True)).sum().backward()
    ours = [name for name in names if name.startswith("mesa_tune")]
    assert ours == ["mesa_tune.quantize_rows.default", "mesa_tune.dequantize.default"]
