"""`store: recompute` (`on module:`): packed inputs alone are kept, and the module runs again in backward."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune import ops
from mesa_tune.errors import PolicyError, RunError
from mesa_tune.policy import Policy
from mesa_tune.profiler.meter import Meter

WIDTH, ROWS = 32, 256
EVERYTHING = 10**9


class Block(nn.Module):
    """Batch norm, dropout, a second argument and a second result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        h = F.dropout(F.gelu(self.linear(self.norm(x))), 0.2, training=self.training)
        return {"x": x + h * scale, "sum": h.sum(), "count": 3}


class Model(nn.Module):
    """Three blocks in a list, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), x.new_zeros(())
        for block in self.blocks:
            out = block(x, scale=torch.full((), 0.5))
            x, total = out["x"], total + out["sum"]
        y: Tensor = self.last(x).square().mean() + 1e-3 * total
        return y


def policy(names: str = "blocks.*", level: int = 256) -> Policy:
    return Policy.parse(
        f"# mesa-tune policy 1\non module:\n    by_name: {names}\n    level: {level}\n    store: recompute\n"
    )


def converted(plain: nn.Module, names: str = "blocks.*", *, level: int = 256, exact: bool = False) -> Any:
    least = EVERYTHING if exact else 1024
    return mt.convert(copy.deepcopy(plain), policy(names, level), seed=1, min_elements=least)


def step(network: Callable[[Tensor], Tensor], weights: list[Tensor], x: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    y = network(x)
    return [y.detach(), *torch.autograd.grad(y, weights)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("names", ["blocks.*", "blocks.1", "blocks.0 blocks.0.norm blocks.2.linear"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_from_exact_inputs_the_step_is_plains(names: str, training: bool) -> None:
    plain, x = Model().train(training), torch.randn(ROWS, WIDTH)
    network = converted(plain, names, exact=True)
    for _ in range(2):
        expected, found = (step(each, list(each.parameters()), x) for each in (plain, network))
        assert same(found, expected)
        assert same(list(network.buffers()), list(plain.buffers()))
    torch.manual_seed(5)
    plain(x)
    after = torch.rand(1)
    step(network, list(network.parameters()), x)
    torch.manual_seed(5)
    network(x).backward()
    assert torch.equal(torch.rand(1), after)


def test_only_packed_inputs_are_kept() -> None:
    network, x = converted(nn.Sequential(Model()), "0.blocks.*", level=16), torch.randn(ROWS, WIDTH)
    with Meter() as meter:
        y = network(x)
        kept = meter.live_bytes
    del y
    packed = 3 * ops.packed_bytes(ROWS * WIDTH, 4)
    small = 2 * ROWS * WIDTH * 4  # what the two linear layers keep plainly: last's input, and its square's
    assert packed < kept - small < packed + 20_000


def test_gradients_from_packed_inputs_are_near() -> None:
    plain, x = Model(), torch.randn(ROWS, WIDTH)
    network = converted(plain)
    expected, found = (
        torch.cat([each.flatten() for each in step(one, list(one.parameters()), x)])
        for one in (plain, network)
    )
    assert 0 < (found - expected).norm() < 0.02 * expected.norm()


def test_autocast_is_that_of_the_forward() -> None:
    plain, x = Model(), torch.randn(ROWS, WIDTH)
    network = converted(plain, exact=True)

    def cast(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y: Tensor = model(x)
            return y

        return run

    expected = step(cast(plain), list(plain.parameters()), x)
    assert same(step(cast(network), list(network.parameters()), x), expected)


def test_a_second_backward_gives_the_same() -> None:
    network, x = converted(Model()), torch.randn(ROWS, WIDTH)
    y, weights = network(x), list(network.parameters())
    first = torch.autograd.grad(y, weights, retain_graph=True)
    assert same(list(torch.autograd.grad(y, weights)), list(first))


def test_two_runs_before_backward() -> None:
    plain = Model().eval()
    network = converted(plain, exact=True)
    a, b = torch.randn(2, ROWS, WIDTH).unbind()
    expected = torch.autograd.grad(plain(a) + plain(b), list(plain.parameters()))
    assert same(
        list(torch.autograd.grad(network(a) + network(b), list(network.parameters()))), list(expected)
    )


def test_settings_hold_in_the_second_run() -> None:
    text = policy().dumps() + "\non fc:\n    by_index: all\n    level: 2\n"
    plain, x = Model(), torch.randn(ROWS, WIDTH)
    network = mt.convert(copy.deepcopy(plain), Policy.parse(text), seed=1, min_elements=1024)
    name = "blocks.1.linear.weight"
    expected = step(plain, [plain.get_parameter(name)], x)[1]
    found = step(network, [network.get_parameter(name)], x)[1]
    assert (found - expected).norm() > 0.2 * expected.norm()


def test_changing_the_input_in_place_is_refused() -> None:
    class Bad(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.relu_())

    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), Bad(WIDTH, WIDTH))
    mt.convert(network, policy("1"))
    with pytest.raises(RunError, match="'1' changes its input in place"):
        network(torch.randn(ROWS, WIDTH))


def test_recompute_is_for_modules() -> None:
    wrong = Policy.uniform(level=16, store="recompute")
    with pytest.raises(PolicyError, match="is for whole modules"):
        mt.convert(Model(), wrong)


def test_frozen_parts_and_inputs() -> None:
    plain, x = Model().eval(), torch.randn(ROWS, WIDTH)
    for name in ("first", "blocks.0"):
        plain.get_submodule(name).requires_grad_(False)
    network = converted(plain, exact=True)
    expected, found = (
        step(each, [weight for weight in each.parameters() if weight.requires_grad], x)
        for each in (plain, network)
    )
    assert same(found, expected)


def test_compiled_code_says_that_it_does_not_run_again() -> None:
    plain, x = Model().eval(), torch.randn(ROWS, WIDTH)
    network = converted(plain, exact=True)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    expected = step(plain, list(plain.parameters()), x)
    with pytest.warns(UserWarning, match=r"recompute` of 'blocks\.0' has no effect in compiled code"):
        found = step(compiled, list(network.parameters()), x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_copies_are_independent() -> None:
    network, x = converted(Model().eval(), exact=True), torch.randn(ROWS, WIDTH)
    twin = copy.deepcopy(network)
    expected = step(network, list(network.parameters()), x)
    with torch.no_grad():
        for weight in network.parameters():
            weight.zero_()
    assert same(step(twin, list(twin.parameters()), x), expected)
