"""GACT's users: `Controller(model)`, `install_hook()`, and `iterate(backprop)` after each step."""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mesa_tune import Policy, convert, notice, revert
from mesa_tune.compat import gact
from mesa_tune.compat.gact.controller import Controller
from mesa_tune.compat.gact.sensitivity import Estimate, perturbed
from mesa_tune.conversion.model import conversion_of
from mesa_tune.measure.memory.trace import observing
from tests.builders import Checkpointed, no_trace
from tests.compat_measures import error, gradient, saved_bytes
from tests.step_memory import Composed

CLASSES = 512
TAGS = {  # of a layer of each kind
    "blocks.0.proj": "fc",
    "blocks.0.mlp.0": "fc",
    "blocks.0.mlp.1": "gelu",
    "blocks.0.norm1": "layernorm",
    "blocks.0.matmul.0": "matmul",
    "blocks.0.softmax.0": "softmax",
}


def through_block(m: Any, x: Tensor) -> Any:
    """A transformer block whose attention is written with products and a softmax."""
    q, k, v = m.qkv(m.norm1(x)).chunk(3, dim=-1)
    weights = (q @ k.transpose(1, 2) / 8).softmax(dim=-1)
    x = x + m.proj(weights @ v)
    return x + m.mlp(m.norm2(x))


def through_net(m: Any, x: Tensor) -> Any:
    return m.head(m.drop(m.blocks(m.norm(m.first(x))).mean(1)))


def net() -> Any:
    """A small transformer over vectors, with many classes."""
    ends = {"first": nn.Linear(32, 64), "norm": nn.BatchNorm1d(48)}
    norms = {"norm1": nn.LayerNorm(64), "norm2": nn.LayerNorm(64)}
    linear = {"qkv": nn.Linear(64, 192), "proj": nn.Linear(64, 64)}
    mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    blocks = nn.Sequential(Composed(through_block, **norms, **linear, mlp=mlp))
    return Composed(through_net, **ends, blocks=blocks, drop=nn.Dropout(0.1), head=nn.Linear(64, CLASSES))


def make() -> tuple[Any, Callable[[], Tensor]]:
    """The network and its loss on one batch, with the same dropout each time."""
    torch.manual_seed(0)
    model, x, y = net(), torch.randn(16, 48, 32), torch.randint(0, CLASSES, (16,))

    def loss() -> Tensor:
        torch.manual_seed(2)
        return F.cross_entropy(model(x), y)

    return model, loss


@pytest.fixture
def installed() -> Iterator[Callable[[nn.Module], Controller]]:
    made: list[Controller] = []

    def install(model: nn.Module) -> Controller:
        made.append(Controller(model))
        made[-1].install_hook()
        return made[-1]

    yield install
    for controller in made:
        controller.uninstall_hook()


Install = Callable[[nn.Module], Controller]


@pytest.mark.parametrize(
    ("level", "share", "most"),
    [
        *((level, 1.001, 1e-12) for level in ("L0", "swap")),
        *((level, 0.18, 0.1) for level in ("L1", "L2", "L3", "L4bit-swap")),
        *(("L1.1", 0.31, 1e-3), ("L1.2", 0.12, 3), ("L2.1", 0.18, 0.3), ("L2.2", 0.16, 3)),
    ],
)
def test_levels(level: str, share: float, most: float, installed: Install) -> None:
    model, loss = make()
    keys, output = list(model.state_dict()), loss()
    before, exact = saved_bytes(model, loss), gradient(model, loss)
    gact.set_optimization_level(level)
    controller = installed(model)
    assert torch.equal(loss(), output)
    for _ in range(2):
        assert saved_bytes(model, loss) < share * before
        assert error(gradient(model, loss), exact) < most
        controller.iterate(lambda: loss().backward())
    assert list(model.state_dict()) == keys
    controller.uninstall_hook()
    assert conversion_of(model) is None


def test_training_script(installed: Install) -> None:
    """Its iterations are as GACT's README writes them."""
    model, loss = make()
    controller, output = installed(model), loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def backprop() -> None:
        model.train()
        value = loss()
        optimizer.zero_grad()
        value.backward()

    for _ in range(3):
        backprop()
        optimizer.step()
        controller.iterate(backprop)
    assert loss() < output


def test_adaptation_lowers_the_error_at_no_more_bytes(installed: Install) -> None:
    model, loss = make()
    exact = gradient(model, loss)
    gact.set_optimization_level("L2.1")
    gact.set_adapt_interval(100)
    controller = installed(model)
    controller.adapt(lambda: loss().backward())
    placed = saved_bytes(model, loss)
    adapted = sum(error(gradient(model, loss), exact) for _ in range(4))
    assert len(set(controller.bits.values())) > 2
    controller.uninstall_hook()
    gact.set_optimization_level("L1")
    gact.config.bit = 3
    installed(model)
    uniform = sum(error(gradient(model, loss), exact) for _ in range(4))
    assert adapted < 0.6 * uniform
    assert placed <= 1.02 * saved_bytes(model, loss)


def test_sharers_are_stored_alike(installed: Install) -> None:
    model, loss = make()
    controller = installed(model)
    controller.adapt(lambda: loss().backward())
    # The softmax's output is kept by itself and by the product that follows.
    assert controller.bits["blocks.0.softmax.0"] == controller.bits["blocks.0.matmul.1"]
    assert "loss.cross_entropy.0" in controller.bits


def test_adaptation_is_deterministic_and_leaves_no_trace(installed: Install) -> None:
    found = []
    for _ in range(2):
        model, loss = make()
        controller = installed(model)
        loss().backward()
        with no_trace(model):
            controller.iterate(lambda loss=loss: loss().backward())  # type: ignore[misc]
        found.append(controller.bits)
        controller.uninstall_hook()
    assert found[0] == found[1]


def test_the_interval_counts_iterations(installed: Install) -> None:
    model, x = nn.Linear(64, 64), torch.randn(256, 64)
    gact.set_adapt_interval(3)
    controller, calls = installed(model), []

    def backprop() -> None:
        calls.append(controller.iter)
        model(x).square().sum().backward()

    for _ in range(7):
        controller.iterate(backprop)
    assert calls == [0, 3, 6]


def test_a_retained_graph_gives_the_same_gradient_again(installed: Install) -> None:
    model, loss = make()
    installed(model)
    value, parameters = loss(), list(model.parameters())
    first = torch.autograd.grad(value, parameters, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(value, parameters)))


def test_bfloat16_is_compressed(installed: Install) -> None:
    model, loss = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = saved_bytes(model, loss)
        gact.set_optimization_level("L1")
        installed(model)
        assert saved_bytes(model, loss) < 0.3 * before


def test_what_get_grad_must_do(installed: Install) -> None:
    model, _ = make()
    with pytest.raises(ValueError, match="must run a forward and a backward"):
        installed(model).iterate(lambda: None)


def test_without_hooks_nothing_happens() -> None:
    model, loss = make()
    exact = gradient(model, loss)
    controller = Controller(model)
    controller.iterate(pytest.fail)
    controller.uninstall_hook()
    assert torch.equal(gradient(model, loss), exact)


def test_a_controller_keeps_the_configuration_of_its_making() -> None:
    gact.set_optimization_level("L1.1")
    controller = Controller(nn.Linear(2, 2))
    gact.set_optimization_level("L2.2")
    assert (controller.config.bit, controller.config.auto_prec) == (8, False)
    assert (gact.config.bit, gact.config.auto_prec) == (2, True)


def test_unknown_levels_and_fields_are_named() -> None:
    with pytest.raises(ValueError, match="level must be one of L0, L1"):
        gact.set_optimization_level("L7")
    gact.config.check_dup = True
    with pytest.warns(UserWarning, match=r"gact\.config\.check_dup means nothing here"):
        Controller(nn.Linear(2, 2))


@pytest.mark.parametrize("shape", [(300,), (7, 11, 13), (256, 1)], ids=str)
def test_noise_stays_in_proportion_to_each_groups_range(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    moved = perturbed(x)
    assert moved.shape == x.shape
    assert torch.equal(moved, perturbed(x))
    assert 0 < (moved - x).abs().max() <= (x.max() - x.min()) / 32
    assert torch.equal(perturbed(torch.full(shape, 3.0)), torch.full(shape, 3.0))


def test_estimates_rank_layers_as_measured_errors_do(installed: Install) -> None:

    model, loss = make()
    exact = gradient(model, loss)
    estimate: Any = Estimate(list(model.parameters()))
    convert(model, Policy.uniform(256))
    with observing(estimate):
        loss().backward()
    ratios = []
    for layer, tag in TAGS.items():
        convert(model, Policy.parse(f"# mesa-tune policy 1\non {tag}:\n  by_name: {layer}\n  level: 4\n"))
        ratios.append(sum(error(gradient(model, loss), exact) for _ in range(4)) / estimate.errors[layer])
    revert(model)
    assert torch.tensor(ratios).log().std() < 0.4


def below_hooks(controller: Any, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`loss`, below hooks as GACT's programs write them."""

    def pack_hook(tensor: Tensor) -> Any:
        return controller.quantize(tensor)

    def unpack_hook(packed: Any) -> Any:
        return controller.dequantize(packed)

    def run() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack_hook, unpack_hook):
            return loss()

    return run


@pytest.mark.parametrize(
    ("level", "share", "most"), [("L1", 0.4, 0.1), ("L1.1", 0.5, 1e-3), ("L2", 0.4, 0.1)]
)
def test_hooks_of_the_program(level: str, share: float, most: float) -> None:
    """`saved_tensors_hooks(pack, unpack)` around the loop, in place of install_hook()."""
    model, loss = make()
    keys, output, plain_forward = list(model.state_dict()), loss(), inspect.signature(model.forward)
    before, exact = saved_bytes(model, loss), gradient(model, loss)
    gact.set_optimization_level(level)
    controller = Controller(model)
    assert torch.equal(gradient(model, loss), exact)  # not below the hooks
    hooked = below_hooks(controller, loss)
    assert torch.equal(hooked(), output)
    for _ in range(2):  # the first forward is compressed as the later ones are
        assert saved_bytes(model, hooked) < share * before
        assert 0 < error(gradient(model, hooked), exact) < most
        controller.iterate(lambda: hooked().backward())
    assert (len(set(controller.bits.values())) > 1) is (level == "L2")
    assert torch.equal(gradient(model, loss), exact)
    assert (list(model.state_dict()), inspect.signature(model.forward)) == (keys, plain_forward)
    controller.uninstall_hook()
    assert "forward" not in model.__dict__


def test_a_layer_by_itself_below_hooks() -> None:
    """The model's own call is compressed in its first forward already."""
    layer, x = nn.BatchNorm2d(3), torch.randn(64, 3, 28, 28)
    gact.set_optimization_level("L1")

    def grad(run: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(run(leaf), leaf, x.abs())[0]

    exact, controller = grad(layer), Controller(layer)
    assert 0 < error(grad(lambda leaf: below_hooks(controller, lambda: layer(leaf))()), exact) < 0.1
    assert torch.equal(grad(layer), exact)


@pytest.mark.parametrize("how", ["bound methods", "an object's"])
def test_other_hooks_that_lead_to_a_controller(how: str) -> None:
    model, loss = make()
    exact = gradient(model, loss)
    gact.set_optimization_level("L1")
    controller = Controller(model)
    own = (controller.quantize, controller.dequantize)
    holder = SimpleNamespace(quantize=own[0], dequantize=own[1])  # no variable of its hooks is the controller
    with torch.autograd.graph.saved_tensors_hooks(*own) if how == "bound methods" else nullcontext():
        hooked = loss if how == "bound methods" else below_hooks(holder, loss)
        errors = [error(gradient(model, hooked), exact) for _ in range(2)]
    assert errors[1] > 1e-4
    assert (errors[0] > 0) is (how == "bound methods")  # else it shows when it is called


def test_hooks_of_others_are_left_alone() -> None:
    model, loss = make()
    exact, controller = gradient(model, loss), Controller(model)
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(gradient(model, loss), exact)
    assert not controller.is_applied


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_below_hooks(reentrant: bool) -> None:
    model, loss = make()
    exact = gradient(model, loss)
    gact.set_optimization_level("L1")
    model.blocks = Checkpointed(model.blocks, reentrant)
    assert 0 < error(gradient(model, below_hooks(Controller(model), loss)), exact) < 0.1


def test_the_loss_below_hooks_is_named() -> None:
    notice._given.clear()
    model, loss = make()
    controller = Controller(model)
    with pytest.warns(UserWarning, match="leaves unchanged what functions outside the model"):
        below_hooks(controller, loss)()


def test_copies_below_hooks_are_plain() -> None:
    model, loss = make()
    controller, x = Controller(model), torch.randn(16, 48, 32)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):

        def output(other: nn.Module = other) -> Any:
            torch.manual_seed(2)
            return other(x).square().sum()

        found = gradient(other, below_hooks(controller, output))
        assert torch.equal(found, gradient(other, output))
    assert error(gradient(model, below_hooks(controller, loss)), gradient(model, loss)) > 0


def test_an_adaptation_without_a_function() -> None:
    model, loss = make()
    gact.set_optimization_level("L1")
    controller = Controller(model)
    below_hooks(controller, loss)()
    controller.iterate(None)
    gact.set_optimization_level("L2")
    controller = Controller(model)
    below_hooks(controller, loss)()
    with pytest.raises(ValueError, match="iteration 0 adapts"):
        controller.iterate(None)


def test_fields_assigned_after_a_controller_say_so() -> None:
    Controller(nn.Linear(2, 2))
    notice._given.clear()
    with pytest.warns(UserWarning, match="applies only to controllers created from now on"):
        gact.config.bit = 3
    with pytest.warns(UserWarning, match=r"gact\.config\.bits .*GACT has no such field"):
        gact.config.bits = 3


@pytest.mark.parametrize(
    ("bits", "shape"), [(1, (300,)), (2, (512, 256)), (4, (7, 11, 13)), (8, (512, 256))], ids=str
)
def test_quantizing_a_tensor(bits: int, shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    data, given_bits, scale, low = stored = gact.ops.op_quantize(x, bits, 3)
    assert (given_bits, data.dtype) == (bits, torch.uint8)
    assert scale.shape == low.shape == (-(-x.numel() // 256), 1, 1)
    step = scale.flatten().repeat_interleave(256)[: x.numel()].view(shape)
    assert ((gact.ops.op_dequantize(stored, x.shape) - x).abs() <= step * 1.001).all()
    assert torch.equal(gact.ops.op_quantize(x, bits, 3)[0], data)
    assert not torch.equal(gact.ops.op_quantize(x, bits, 4)[0], data)
    if x.numel() % 256 == 0:
        assert torch.equal(low.flatten(), x.view(-1, 256).amin(1))


def test_quantizing_with_32_bits_is_exact() -> None:
    x = torch.randn(5, 100)
    stored = gact.ops.op_quantize(x, 32, 0)
    assert torch.equal(gact.ops.op_dequantize(stored, x.shape), x)
    with pytest.raises(ValueError, match="1 <= bits <= 8"):
        gact.ops.op_quantize(x, 16, 0)


def test_masks_take_a_bit_an_element() -> None:
    mask = F.one_hot(torch.arange(0, 100) % 77).to(torch.uint8)
    stored = gact.ops.op_quantize_mask(mask)
    assert stored[0].numel() == -(-mask.numel() // 8)
    assert torch.equal(gact.ops.op_dequantize_mask(stored), mask)
    floats = gact.ops.op_quantize(mask.float(), 1, 0)
    assert torch.equal(gact.ops.op_dequantize(floats, mask.shape), mask.float())


def test_attention_in_chunks_is_attention() -> None:
    q, k, v = (torch.rand(2, 3, 40, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    found = gact.ops.self_atten(0.0, q, k, v, 16, 8)
    expected = (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(each.sum(), (q, k, v)) for each in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_samples_of_a_tensor() -> None:
    x = torch.randn(8, 16, 32)
    sample = gact.utils.uniform_sample(x, 10)
    assert sample == gact.utils.uniform_sample_ref(x, 10)
    assert sample == [x.data_ptr(), *x.flatten()[:: x.numel() // 10][:10].tolist()]
    state = torch.get_rng_state()
    assert gact.utils.random_sample(x, 10) == gact.utils.random_sample(x, 10)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(gact.utils.random_sample(x, 10, add_dataptr=False)) == 10
    assert gact.utils.compute_tensor_bytes([x, 3]) == x.nbytes + 4


def test_kernels_that_are_not_here_say_why() -> None:
    with pytest.raises(AttributeError, match=r"no_scheme_quantize_pack: not supported: .*use op_quantize"):
        _ = gact.ops.no_scheme_quantize_pack
