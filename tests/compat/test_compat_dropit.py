"""DropIT's users: `to_dropit(model, strategy='mink', gamma=0.9)`, and a training loop that stays as it is."""

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

import mesa_tune as mt
import mesa_tune.compat.mesa as ms
from mesa_tune.compat import gact
from mesa_tune.compat.dropit import to_dropit
from mesa_tune.compat.dropit.dropiter import DropITer
from tests.builders import descend, gpt2, own_loss, words
from tests.compat_measures import error, gradient, saved_bytes

GAMMA = 0.9


def convnet() -> tuple[nn.Sequential, Callable[[nn.Module], Tensor]]:
    """What DropIT's README trains, in small, and its loss on one batch."""
    torch.manual_seed(0)
    images, labels = torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))
    convolutions = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, bias=False)
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * 64, 64), nn.Linear(64, 10))
    return model, lambda net: F.cross_entropy(net(images), labels)


def dropped(x: Tensor, gamma: float) -> Tensor:
    """DropIT's formula: the int(numel (1 - γ)) largest magnitudes of the whole tensor, zero elsewhere."""
    flat = x.detach().flatten()
    kept = flat.abs().topk(int(flat.numel() * (1 - gamma))).indices
    return torch.zeros_like(flat).index_copy_(0, kept, flat[kept]).view_as(x)


@pytest.mark.parametrize(("strategy", "gamma"), [("mink", 0.9), ("mink_cpuidx", 0.5)])
def test_linear_has_dropits_gradients(strategy: str, gamma: float) -> None:
    layer, x, grad = nn.Linear(40, 30), torch.randn(6, 20, 40, requires_grad=True), torch.randn(6, 20, 30)
    assert to_dropit(layer, strategy=strategy, gamma=gamma) is layer
    layer(x).backward(grad)
    expected = grad.flatten(0, 1).T @ dropped(x, gamma).flatten(0, 1)
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(x.grad, grad @ layer.weight.detach(), rtol=1e-6, atol=1e-5)


def test_conv2d_has_dropits_gradients_on_transposed_inputs() -> None:
    layer = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
    x = torch.randn(5, 9, 8, 4).permute(0, 3, 1, 2)
    y = to_dropit(layer, gamma=0.8)(x)
    grad = torch.randn(y.shape)
    y.backward(grad)
    expected = conv2d_weight(dropped(x.contiguous(), 0.8), (8, 2, 3, 3), grad, 2, 1, 1, 2)
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-6, atol=1e-5)


def test_vrandom_keeps_so_many_elements_as_they_are() -> None:
    layer, x = nn.Linear(400, 1, bias=False), torch.rand(1, 400) + 1
    (found,) = torch.autograd.grad(to_dropit(layer, "vrandom", 0.75)(x), layer.weight)
    kept = found != 0
    assert kept.sum() == 100
    assert torch.equal(found[kept], x[kept])
    assert not torch.equal(kept[0], dropped(x, 0.75)[0] != 0)


def test_training_script() -> None:
    model, loss = convnet()
    plain = copy.deepcopy(model)
    keys, output = list(model.state_dict()), loss(plain)
    before = saved_bytes(plain, lambda: loss(plain))
    to_dropit(model, strategy="mink", gamma=GAMMA)
    assert torch.equal(loss(model), output)
    assert list(model.state_dict()) == keys
    # Three of four inputs drop to 4 bytes for each tenth element and a bit for every one.
    assert saved_bytes(model, lambda: loss(model)) < 0.25 * before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    descend(optimizer, lambda: loss(model), 30)
    assert loss(model) < 0.2 * output


def test_a_higher_gamma_errs_more() -> None:
    errors = []
    model, loss = convnet()
    exact = gradient(model, lambda: loss(model))
    for gamma in (0.0, 0.3, 0.6, 0.9):
        to_dropit(model, gamma=gamma)
        errors.append(error(gradient(model, lambda: loss(model)), exact))
    assert errors[0] == 0
    assert errors == sorted(errors)


def test_gpt2() -> None:
    torch.manual_seed(0)
    model, batch = gpt2(layers=1).train(), words(4)

    def loss() -> Any:
        torch.manual_seed(1)
        return own_loss(model, batch)

    before, output, keys = saved_bytes(model, loss), loss(), list(model.state_dict())
    exact = gradient(model, loss)
    to_dropit(model, strategy="mink", gamma=0.5)
    assert hasattr(model.get_submodule("transformer.h.0.attn.c_attn"), "dropiter")
    assert torch.equal(loss(), output)
    assert list(model.state_dict()) == keys
    assert saved_bytes(model, loss) < before
    assert 0 < error(gradient(model, loss), exact) < 0.2


def test_modules_with_no_dropit_are_left_alone() -> None:
    model, _ = convnet()
    model[4].no_dropit = True  # type: ignore[assignment]
    to_dropit(model)
    assert not {"dropiter", "forward"} & vars(model[4]).keys()
    assert {"dropiter", "forward"} <= vars(model[3]).keys()


def test_subclasses_are_named() -> None:
    class Special(nn.Linear):
        pass

    with pytest.warns(UserWarning, match="'0' as it is: Special"):
        to_dropit(nn.Sequential(Special(2, 2)))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="strategy must be one of mink"):
        to_dropit(nn.Linear(2, 2), strategy="maxk")
    with pytest.raises(ValueError, match="0 <= gamma < 1"):
        to_dropit(nn.Linear(2, 2), gamma=1.0)


def test_a_deepcopy_drops_by_itself_and_keeps_its_signature() -> None:
    model, loss = convnet()
    to_dropit(model)
    other: Any = copy.deepcopy(model)
    assert other[4].forward.module is other[4]
    assert inspect.signature(other[4].forward) == inspect.signature(nn.Linear(1, 1).forward)
    assert torch.equal(gradient(other, lambda: loss(other)), gradient(model, lambda: loss(model)))


def test_again_replaces_gamma() -> None:
    layer, x = nn.Linear(10, 10), torch.randn(4, 10)
    to_dropit(to_dropit(layer, gamma=0.9), gamma=0.5)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, dropped(x, 0.5).sum(0).expand(10, 10))


def test_evaluation_keeps_everything() -> None:
    model, loss = convnet()
    exact = gradient(model, lambda: loss(model))
    to_dropit(model).eval()
    assert torch.equal(gradient(model, lambda: loss(model)), exact)


def test_with_mesa(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10))
    x = torch.randn(50, 64)
    ms.policy.convert_by_num_groups(model, 2)
    to_dropit(model, strategy="mink", gamma=0.9)
    policy = tmp_path / "policy.txt"
    policy.write_text("on fc layernorm gelu:\n  by_index: all\n  enable: True\n")
    plain = copy.deepcopy(model)
    ms.policy.deploy_on_init(model, policy, verbose=str)
    hidden: list[Tensor] = []
    model[3].register_forward_hook(lambda module, given, output: hidden.append(given[0]))
    y = model(x)
    assert torch.equal(y, plain(x))
    grad = torch.randn(y.shape)
    y.backward(grad)
    # DropIT stores what the linear layers keep, Mesa the rest.
    torch.testing.assert_close(model[3].weight.grad, grad.T @ dropped(hidden[0], 0.9), rtol=1e-5, atol=1e-5)
    assert isinstance(model[1], ms.LayerNorm)
    assert [int(model[place].iteration) for place in (1, 3)] == [1, 0]


@pytest.mark.parametrize("order", ["before", "between", "after", "after a step", "below hooks"])
def test_with_gact(order: str) -> None:
    """DropIT's own program calls to_dropit after GACT's install_hook()."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.Linear(128, 10))
    x = torch.randn(64, 64, requires_grad=True)
    gact.set_optimization_level("L1")
    if order == "before":
        to_dropit(model, strategy="mink", gamma=0.9)
    controller = gact.controller.Controller(model)
    if order == "between":
        to_dropit(model, strategy="mink", gamma=0.9)
    hooks: Any = nullcontext()
    if order == "below hooks":
        hooks = torch.autograd.graph.saved_tensors_hooks(controller.quantize, controller.dequantize)
    else:
        controller.install_hook()
    with hooks:
        if order in ("after a step", "below hooks"):
            model(x).sum().backward()
            controller.adapt(lambda: model(x).sum().backward())
            assert "2" in controller.bits
            model.zero_grad()
        if order not in ("before", "between"):
            to_dropit(model, strategy="mink", gamma=0.9)
        hidden: list[Tensor] = []
        model[2].register_forward_hook(lambda module, given, output: hidden.append(given[0]))
        if order != "below hooks":
            before = saved_bytes(model, lambda: model(x).square().sum())
            assert before < 5 * 4 * 64 * 128 * 0.3
        model(x).sum().backward()
        grad = model[3].weight.detach().sum(0).expand(64, 128)
        expected = grad.T @ dropped(hidden[-1], 0.9)
        torch.testing.assert_close(model[2].weight.grad, expected, rtol=1e-4, atol=1e-4)
        controller.adapt(lambda: model(x).sum().backward())
        assert list(controller.bits) == ["1"]  # what DropIT has taken has no bits to place
    controller.uninstall_hook()
    model.zero_grad()
    model(x).sum().backward()  # DropIT stays
    torch.testing.assert_close(model[2].weight.grad, grad.T @ dropped(hidden[-1], 0.9), rtol=1e-4, atol=1e-4)


def test_in_a_converted_model_the_policy_decides_and_a_warning_says_so() -> None:
    model = mt.convert(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 10)), mt.Policy.uniform(256))
    with pytest.warns(UserWarning, match=r"to_dropit has no effect here.*\n?.*`drop: 0\.8`"):
        to_dropit(model, gamma=0.8)


@pytest.mark.parametrize("strategy", ["mink", "mink_cpuidx", "vrandom"])
def test_functions_of_ones_own_select_and_pad(strategy: str) -> None:
    """As DropIT's forward functions do, with the context of their autograd.Function."""
    dropiter, ctx = DropITer(strategy, 0.75), SimpleNamespace()
    x = torch.randn(10, 6, 8).transpose(0, 1)
    saved = dropiter.select(x, ctx)
    whole = dropiter.pad(saved, ctx).view(x.shape)
    if strategy == "vrandom":
        assert 0.15 < (whole != 0).float().mean() < 0.35
        assert torch.equal(whole[whole != 0], x[whole != 0])
    else:
        assert (saved.numel(), ctx.idxs.dtype, ctx.numel) == (120, torch.int32, 480)
        assert saved.dropped  # type: ignore[attr-defined]
        assert torch.equal(whole, dropped(x, 0.75))
    assert dropiter.reserve == 0.25


def test_transfer_is_to_dropit() -> None:
    layer = nn.Linear(10, 10)
    assert DropITer.transfer(layer, "mink", 0.5, True) is layer
    assert isinstance(layer.dropiter, DropITer)
    assert (layer.dropiter.gamma, layer.dropiter.autocast) == (0.5, True)
