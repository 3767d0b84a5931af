"""Under torch.compile(fullgraph=True) a converted model is traced whole and keeps packed tensors only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import mesa_tune as mt
from mesa_tune.policy import Policy
from tests.builders import Block, Calling, Fixed, MLPBlock, ViT, conversion, descend, gradients, policy_of
from tests.conformance.running import relative_error, saved_bytes
from tests.step_memory import Composed

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(name="one_graph_each")
def _one_graph_each() -> Iterator[None]:
    """Let torch.compile make one graph of a function; 8 by itself."""
    with torch._dynamo.config.patch(recompile_limit=1):
        yield


def _convert(model: nn.Module, level: int = 16) -> nn.Module:
    return mt.convert(copy.deepcopy(model), Policy.uniform(level=level), seed=1, min_elements=0)


def _saved_when_traced(model: nn.Module, run: Any, x: Tensor = X) -> int:
    """Bytes that the compiled nodes of the graph hold for backward, less parameters, buffers and the batch.

    A dispatch mode cannot be on while a whole graph is traced, so the graph itself is asked.
    """
    gradients(model, x, run=run)
    never = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers(), x)}
    held: dict[int, int] = {}
    for node in _nodes(run(x).sum().grad_fn):
        for tensor in node.saved_tensors if "Compiled" in type(node).__name__ else ():
            storage = tensor.untyped_storage()
            held[storage._cdata] = 0 if storage._cdata in never else storage.nbytes()
    return sum(held.values())


def _nodes(root: Any) -> set[Any]:
    seen: set[Any] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow("compile"))]
)
def test_one_graph_that_trains_and_keeps_packed_tensors_only(backend: str) -> None:
    plain, x = Block(64), torch.randn(4, 24, 64)
    model = _convert(plain)
    eager = saved_bytes(model, x)
    run = torch.compile(model, fullgraph=True, backend=backend)
    if backend == "aot_eager":  # inductor has kernels of its own
        assert torch.equal(run(x), plain(x))
    first, second = gradients(model, x, run=run), gradients(model, x, run=run)
    assert 0 < relative_error(first, gradients(plain, x)) < 0.3
    assert relative_error(first, second) > 0, "two steps have the same noise"
    found = _saved_when_traced(model, run, x)
    assert 0.5 * eager < found <= 1.1 * eager, f"compiled keeps {found} bytes, eager {eager}"
    assert found < 0.3 * saved_bytes(plain, x)


@pytest.mark.usefixtures("one_graph_each")
def test_blocks_compiled_one_by_one_make_one_graph_each() -> None:
    """There are more alike blocks than torch.compile makes graphs of one function."""
    plain = nn.Sequential(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2)))
    model = _convert(plain)
    eager = gradients(model, X)
    model = _convert(plain)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.children():
        block.compile(fullgraph=True, backend=counter)
    assert torch.equal(model(X), plain(X))
    for name, grad in gradients(model, X).items():
        assert relative_error({name: grad}, {name: eager[name]}) < 0.3, name
    assert counter.frame_count == len(plain), "the settings of no layer changed"
    assert _saved_when_traced(model, model) < 0.3 * saved_bytes(plain, X)


@pytest.mark.slow("compile")
@pytest.mark.usefixtures("one_graph_each")
def test_conversions_do_not_share_what_is_compiled() -> None:
    for _ in range(2):
        model = _convert(nn.Sequential(nn.Linear(16, 16)))
        run = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(run(X), model(X))


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "mul": lambda x: x * x,
    "where": lambda x: torch.where(x > 0, x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "einsum": lambda x: torch.einsum("bij,bij->bij", x, x),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "attention" else pytest.mark.slow("compile")) for name in SAME],
)
def test_one_tensor_in_several_places(name: str) -> None:
    plain = nn.Sequential(nn.Linear(16, 16), Calling(SAME[name]), nn.Linear(16, 16))
    model = _convert(plain, level=256)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(X), plain(X))
    assert 0 < relative_error(gradients(model, X, run=run), gradients(plain, X)) < 1e-3
    assert _saved_when_traced(model, run) <= 1.1 * saved_bytes(model, X), "stored once"


LATER = [
    pytest.param(when, marks=pytest.mark.slow("compile"))
    for when in ("compiled first", "plain compiled before")
]


@pytest.mark.parametrize("when", [*LATER, "eager step first"])
def test_order_of_compiling_and_converting_does_not_matter(when: str) -> None:
    plain = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    model = copy.deepcopy(plain)
    if when == "plain compiled before":
        torch.compile(model, fullgraph=True, backend="aot_eager")(X)
    run: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    subject = run if when == "compiled first" else model
    mt.convert(subject, Policy.uniform(level=16), seed=1, min_elements=0)
    if when == "eager step first":
        gradients(model, X)
    assert 0 < relative_error(gradients(model, X, run=run), gradients(plain, X)) < 0.3
    mt.revert(model)
    assert relative_error(gradients(model, X, run=run), gradients(plain, X)) < 1e-10


@pytest.mark.slow("compile")
def test_settings_by_index_of_functions_arrive_after_one_step() -> None:
    text = "on gelu:\n    by_index: all\n    level: 256\n\n    by_index: 1\n    level: 2\n"
    plain = nn.Sequential(MLPBlock(16), MLPBlock(16))
    model = mt.convert(copy.deepcopy(plain), policy_of(text), seed=1, min_elements=0)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    right = gradients(plain, X)
    first, later = (relative_error(gradients(model, X, run=run), right) for _ in range(2))
    assert later > 10 * first > 0
    assert not conversion(model).first, "the settings are final"


@pytest.mark.slow("training")
def test_it_learns() -> None:
    model = _convert(ViT(depth=1), level=256)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    target = torch.arange(8) % 10
    losses = descend(optimizer, lambda: F.cross_entropy(run(X), target), 15)
    assert losses[-1] < 0.5 * losses[0]


def test_a_compiled_model_trains_inside_compress_saved() -> None:
    plain = MLPBlock(16)
    model = _convert(plain)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with mt.compress_saved(Policy.uniform(level=256)):
            loss = run(X).square().sum()
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert 0 < relative_error(found, gradients(plain, X)) < 0.3
        optimizer.step()
        plain.load_state_dict(model.state_dict())
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]
    with torch.no_grad():
        assert torch.equal(run(X), plain(X))


def test_after_a_graph_break_attributes_of_tensors_are_their_own() -> None:
    # PyTorch's Python code of an LSTM is not traced, and asks for shapes, dtypes and devices.
    layers = {"first": nn.LSTM(32, 32), "second": nn.Linear(32, 32)}
    model, x = Composed(lambda m, x: m.second(m.first(x)[0]), **layers), torch.randn(5, 64, 32)
    right = model(x)
    compiled = torch.compile(mt.convert(model, mt.Policy.uniform(16), seed=0), backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(x), right)


@pytest.mark.parametrize("of", ["view of batch", "buffer"])
def test_batch_and_buffers_are_never_encoded(of: str) -> None:
    plain, x = Fixed(of), torch.randn(64, 64)
    model = _convert(plain, level=2)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(gradients(model, x, run=run)["scale"], gradients(plain, x)["scale"])
