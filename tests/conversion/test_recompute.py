"""`store: recompute` (`on module:`): packed inputs alone are kept, and the module runs again in backward."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune import ops
from mesa_tune.errors import PolicyError, RunError
from mesa_tune.measure.memory.meter import Meter
from mesa_tune.policy import Policy
from tests.builders import Calling, Checkpointed, encodings, gradients, policy_of
from tests.step_memory import Composed

WIDTH, ROWS = 32, 256
EVERYTHING = 10**9


class ScaledBlock(nn.Module):
    """Batch norm, dropout, a second argument and a second result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        h = F.dropout(F.gelu(self.linear(self.norm(x))), 0.2, training=self.training)
        return {"x": x + h * scale, "sum": h.sum(), "count": 3}


def three_blocks() -> nn.Module:
    """Three blocks in a list, between two linear layers."""

    def forward(model: Any, x: Tensor) -> Any:
        x, total = model.first(x), x.new_zeros(())
        for block in model.blocks:
            out = block(x, scale=torch.full((), 0.5))
            x, total = out["x"], total + out["sum"]
        return model.last(x).square().mean() + 1e-3 * total

    ends = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, WIDTH)}
    return Composed(forward, **ends, blocks=nn.ModuleList(ScaledBlock() for _ in range(3)))


def policy(names: str = "blocks.*", level: int = 256) -> Policy:
    return policy_of(f"on module:\n    by_name: {names}\n    level: {level}\n    store: recompute\n")


def converted(plain: nn.Module, names: str = "blocks.*", *, level: int = 256, exact: bool = False) -> Any:
    least = EVERYTHING if exact else 1024
    return mt.convert(copy.deepcopy(plain), policy(names, level), seed=1, min_elements=least)


def step(network: Callable[[Tensor], Tensor], x: Tensor, weights: list[Tensor] | None = None) -> list[Tensor]:
    """The loss, and gradients of `weights`, or of all parameters that require one."""
    torch.manual_seed(5)
    y = network(x)
    y = y.square().mean() if y.dim() else y
    if weights is None:
        assert isinstance(network, nn.Module)
        weights = [weight for weight in network.parameters() if weight.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, weights)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    one, other = (torch.cat([each.flatten() for each in each_of]) for each_of in (found, exact))
    return ((one - other).square().sum() / other.square().sum()).item()


@pytest.mark.parametrize(
    ("names", "training"),
    [("blocks.*", True), ("blocks.1", False), ("blocks.0 blocks.0.norm blocks.2.linear", True)],
)
def test_from_exact_inputs_the_step_is_plains(names: str, training: bool) -> None:
    plain, x = three_blocks().train(training), torch.randn(ROWS, WIDTH)
    network = converted(plain, names, exact=True)
    for _ in range(2):
        expected, found = (step(each, x) for each in (plain, network))
        assert same(found, expected)
        assert same(list(network.buffers()), list(plain.buffers()))
    torch.manual_seed(5)
    plain(x)
    after = torch.rand(1)
    step(network, x)
    torch.manual_seed(5)
    network(x).backward()
    assert torch.equal(torch.rand(1), after)


def test_only_packed_inputs_are_kept() -> None:
    network, x = converted(nn.Sequential(three_blocks()), "0.blocks.*", level=16), torch.randn(ROWS, WIDTH)
    with Meter() as meter:
        y = network(x)
        kept = meter.live_bytes
    del y
    packed = 3 * ops.packed_bytes(ROWS * WIDTH, 4)
    small = 2 * ROWS * WIDTH * 4  # what the two linear layers keep plainly: last's input, and its square's
    assert packed < kept - small < packed + 20_000


def test_gradients_from_packed_inputs_are_near() -> None:
    plain, x = three_blocks(), torch.randn(ROWS, WIDTH)
    network = converted(plain)
    expected, found = (step(one, x) for one in (plain, network))
    assert 0 < error(found, expected) < 0.02**2


def test_autocast_is_that_of_the_forward() -> None:
    plain, x = three_blocks(), torch.randn(ROWS, WIDTH)
    network = converted(plain, exact=True)

    def run(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = model(x)
        return y

    expected, found = (step(partial(run, each), x, list(each.parameters())) for each in (plain, network))
    assert same(found, expected)


def test_a_second_backward_gives_the_same() -> None:
    network, x = converted(three_blocks()), torch.randn(ROWS, WIDTH)
    y, weights = network(x), list(network.parameters())
    first = torch.autograd.grad(y, weights, retain_graph=True)
    assert same(list(torch.autograd.grad(y, weights)), list(first))


def test_two_runs_before_backward() -> None:
    plain = three_blocks().eval()
    network = converted(plain, exact=True)
    a, b = torch.randn(2, ROWS, WIDTH).unbind()
    expected = torch.autograd.grad(plain(a) + plain(b), list(plain.parameters()))
    assert all(
        map(torch.equal, torch.autograd.grad(network(a) + network(b), [*network.parameters()]), expected)
    )


def test_settings_hold_in_the_second_run() -> None:
    text = policy().dumps() + "\non fc:\n    by_index: all\n    level: 2\n"
    plain, x = three_blocks(), torch.randn(ROWS, WIDTH)
    network = mt.convert(copy.deepcopy(plain), Policy.parse(text), seed=1, min_elements=1024)
    name = "blocks.1.linear.weight"
    expected, found = (step(each, x, [each.get_parameter(name)])[1] for each in (plain, network))
    assert (found - expected).norm() > 0.2 * expected.norm()


def test_changing_the_input_in_place_is_refused() -> None:
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), Calling(torch.relu_))
    mt.convert(network, policy("1"))
    with pytest.raises(RunError, match="'1' changes its input in place"):
        network(torch.randn(ROWS, WIDTH))


def test_recompute_is_for_modules() -> None:
    with pytest.raises(PolicyError, match="is for whole modules"):
        mt.convert(three_blocks(), Policy.uniform(level=16, store="recompute"))


def test_frozen_parts_and_inputs() -> None:
    plain, x = three_blocks().eval(), torch.randn(ROWS, WIDTH)
    for name in ("first", "blocks.0"):
        plain.get_submodule(name).requires_grad_(False)
    network = converted(plain, exact=True)
    assert same(step(network, x), step(plain, x))


def test_compiled_code_says_that_it_does_not_run_again() -> None:
    plain, x = three_blocks().eval(), torch.randn(ROWS, WIDTH)
    network = converted(plain, exact=True)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    with pytest.warns(UserWarning, match=r"recompute` of 'blocks\.0' has no effect in compiled code"):
        found = step(compiled, x, list(network.parameters()))
    torch.testing.assert_close(found, step(plain, x))


def test_copies_are_independent() -> None:
    network, x = converted(three_blocks().eval(), exact=True), torch.randn(ROWS, WIDTH)
    twin = copy.deepcopy(network)
    expected = step(network, x)
    for weight in network.parameters():
        weight.data.zero_()
    assert same(step(twin, x), expected)


def test_a_tensor_that_an_earlier_layer_left_gets_its_gradient() -> None:
    def forward(model: Any, x: Tensor) -> Any:
        left.append(model.first(x))
        return model.block(x.square())

    left: list[Tensor] = []
    block: Any = nn.Linear(WIDTH, WIDTH)
    block.forward = lambda x: F.linear(x * left[-1], block.weight)
    network: Any = Composed(forward, first=nn.Linear(WIDTH, WIDTH), block=block)
    x = torch.randn(ROWS, WIDTH)
    weights = [network.first.weight, network.block.weight]
    expected = step(network, x, weights)
    mt.convert(network, policy("block"), seed=1, min_elements=EVERYTHING)
    for _ in range(2):
        assert same(step(network, x, weights), expected)


def of_experts(model: Any, x: Tensor) -> Tensor:
    """Let the best two of four experts have each row; `chosen` are those of each run."""
    weights, chosen = model.router(x).softmax(-1).topk(2)
    model.chosen["runs"].append(chosen)  # too deep to be seen, so it is not put back
    y = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        rows, rank = torch.where(chosen == number)
        y = y.index_add(0, rows, expert(x[rows]) * weights[rows, rank, None])
    return y


def test_experts_are_chosen_again_as_they_were() -> None:
    experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    mixture = Composed(of_experts, router=nn.Linear(WIDTH, 4), experts=experts, chosen={"runs": []})
    plain, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), mixture), torch.randn(ROWS, WIDTH)
    network = converted(plain, "1", level=4)
    expected = step(plain, x)
    for _ in range(2):
        network[1].chosen["runs"].clear()
        assert same(step(network, x), expected)
        assert torch.equal(*network[1].chosen["runs"])


def test_inputs_without_a_gradient_stay_exact() -> None:
    class Biased(nn.Linear):
        def forward(self, input: Tensor, *biases: Tensor) -> Tensor:
            return (super().forward(input) + biases[0]).softmax(-1)

    def outer(model: Any, x: Tensor) -> Any:
        bias = torch.linspace(-3, 3, ROWS * WIDTH).view(ROWS, WIDTH).sin()
        return (model.block(model.first(x), bias) * torch.linspace(-1, 1, WIDTH)).sum()

    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    plain: Any = Composed(outer, first=frozen, block=Biased(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH)
    network = converted(plain, "block")
    expected, found = (step(each, x, [each.block.weight]) for each in (plain, network))
    assert same(found, expected)


def test_choices_that_no_input_takes_part_in_leave_it_packed() -> None:
    def windows(x: Tensor) -> Tensor:
        zones = torch.zeros(ROWS, 1)
        zones[ROWS // 2 :] = 1
        other = (zones != zones.T).float().sum(-1, keepdim=True).long()
        return x.square() + other.clamp(max=1)

    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Calling(windows), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH)
    expected, found = (step(each, x) for each in (plain, converted(plain, "1")))
    assert 0 < error(found[1:], expected[1:]) < 1e-3


def test_small_rows_have_groups_of_their_own() -> None:
    normed = nn.Sequential(nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, WIDTH))
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), normed)
    x = torch.randn(ROWS, WIDTH) * torch.logspace(-3, 3, ROWS)[torch.randperm(ROWS), None]
    weight = torch.randn(ROWS, WIDTH)

    def weighted(model: nn.Module, x: Tensor) -> Any:
        return (model(x) * weight).sum()

    expected, found = (
        step(partial(weighted, each), x, list(each.parameters())) for each in (plain, converted(plain, "1"))
    )
    assert 0 < error(found[1:], expected[1:]) < 1e-3


def residual() -> nn.Module:
    """A part, which runs under PyTorch's checkpoint once that is chosen, and the way around it."""
    layers = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)
    part = Checkpointed(nn.Sequential(*layers), None)
    return Composed(lambda m, x: x + m.checkpointed(x), checkpointed=part)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize(
    ("names", "exact"), [("1 2", True), ("1 2", False), ("1.checkpointed.part 2.checkpointed.part", False)]
)
def test_with_a_checkpoint(names: str, reentrant: bool, exact: bool) -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), residual(), residual(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH)

    def all_gradients(network: nn.Module) -> list[Tensor]:
        torch.manual_seed(5)
        return list(gradients(network, x).values())

    expected = all_gradients(plain)
    for each in (plain[1], plain[2]):
        each.checkpointed.reentrant = reentrant  # type: ignore[union-attr]
    network = converted(plain, names, exact=exact)
    packs = not exact and names == "1 2"  # around: inputs are the checkpoint's own
    for _ in range(3):
        found = all_gradients(network)
        assert 0 < error(found, expected) < 1e-3 if packs else same(found, expected)


def test_second_derivatives_are_refused() -> None:
    network, x = converted(three_blocks()), torch.randn(ROWS, WIDTH)
    with pytest.raises(RunError, match=r"create_graph=True reached 'blocks\.2', which runs again"):
        torch.autograd.grad(network(x), list(network.parameters()), create_graph=True)


def test_a_small_input_changed_after_the_forward_is_refused() -> None:
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    mt.convert(network, policy("1"))
    first = network[0](torch.randn(8, WIDTH))
    y = network[1](first)
    with torch.no_grad():
        first.mul_(2)
    with pytest.raises(RunError, match="an input of '1' was changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("names", ["none.*", "blocks.*"])
def test_layers_inside_encode_only_in_the_second_run(names: str) -> None:
    """What they save in the first one is never used."""
    rules = policy(names).dumps() + Policy.uniform(level=16).dumps().split("\n", 1)[1]
    network: Any = mt.convert(three_blocks(), Policy.parse(rules), seed=1, min_elements=1024)
    x = torch.randn(ROWS, WIDTH)
    losses: list[Tensor] = []
    forward = backward = 0
    for _ in range(3):  # what calls save is known after the first ones
        forward = len(encodings(lambda: losses.append(network(x))))
        backward = len(encodings(losses.pop().backward))
    inside = 3 * 3  # norm, linear and GELU of three blocks
    inputs, outside = 3, 2  # outside: the last linear layer and the square; the batch is never encoded
    if names == "none.*":
        assert (forward, backward) == (inside + outside, 0)
    else:
        assert (forward, backward) == (inputs + outside, inside)
