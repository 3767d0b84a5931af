"""The layers: torch's in all but what they keep."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
import mesa_tune.nn as mn
from mesa_tune.formulas import table
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, LayerSettings
from tests.builders import known
from tests.functional_cases import gradients

FINE = LayerSettings(group_size=64)
LAYERS: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = {
    "Linear": ((32, 16), {"bias": False}, (6, 32)),
    "Conv1d": ((4, 8, 3), {"padding": "same"}, (3, 4, 20)),
    "Conv2d": ((4, 8, 3), {"stride": 2, "groups": 2}, (3, 4, 9, 9)),
    "Conv3d": ((2, 4, 3), {"padding": 1, "padding_mode": "circular"}, (2, 2, 5, 5, 5)),
    "BatchNorm1d": ((6,), {"momentum": None}, (12, 6, 4)),
    "BatchNorm2d": ((6,), {"affine": False}, (4, 6, 5, 5)),
    "BatchNorm3d": ((6,), {"track_running_stats": False}, (4, 6, 3, 3, 3)),
    "LayerNorm": ((32,), {"eps": 1e-3}, (6, 5, 32)),
    "Softmax": ((), {"dim": 1}, (4, 20, 3)),
    "ConvTranspose2d": ((4, 8, 3), {"stride": 2, "output_padding": 1}, (3, 4, 5, 5)),
    "GroupNorm": ((3, 6), {}, (4, 6, 5, 5)),
    "RMSNorm": ((32,), {}, (6, 5, 32)),
    "InstanceNorm2d": ((6,), {"affine": True, "track_running_stats": True}, (4, 6, 5, 5)),
    "MaxPool2d": ((3, 2), {"ceil_mode": True}, (4, 6, 8, 8)),
    "AdaptiveMaxPool1d": ((5,), {}, (4, 6, 12)),
    "AvgPool2d": ((2,), {}, (4, 6, 8, 8)),
    "AdaptiveAvgPool3d": ((2,), {}, (2, 3, 5, 4, 6)),
}
IN_PLACE = ("ReLU", "SiLU", "Hardswish", "SELU", "ReLU6")
PLAIN = ("Mish", "Hardsigmoid", "LogSigmoid", "Softsign", "Tanhshrink", "Tanh", "Sigmoid")
ACTIVATIONS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    **{name: ((), {"inplace": True}) for name in IN_PLACE},
    **{name: ((), {}) for name in PLAIN},
    **{name: ((0.5,), {"inplace": True}) for name in ("ELU", "CELU")},
    **{name: ((0.3,), {}) for name in ("Hardshrink", "Softshrink")},
    "GELU": ((), {"approximate": "tanh"}),
    "Softplus": ((), {"beta": 2}),
    "GLU": ((), {"dim": 1}),
    "LeakyReLU": ((0.2,), {"inplace": True}),
    "Hardtanh": ((-0.5, 0.7), {"inplace": True}),
    "Threshold": ((0.1, 2.0), {}),
    "LogSoftmax": ((-1,), {}),
}
LAYERS |= {name: (*arguments, (8, 32)) for name, arguments in ACTIVATIONS.items()}


def _twins(name: str, settings: LayerSettings = FINE) -> tuple[nn.Module, nn.Module, Tensor]:
    args, kwargs, shape = LAYERS[name]
    torch.manual_seed(0)
    plain = getattr(nn, name)(*args, **kwargs)
    ours = getattr(mn, name)(*args, **kwargs, settings=settings)
    ours.load_state_dict(plain.state_dict())
    return ours, plain, torch.randn(shape)


def _step(layer: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = x.clone().requires_grad_()
    y = layer(x * 1)
    return y, gradients(y, [x, *layer.parameters()])


@pytest.mark.parametrize("name", list(LAYERS))
def test_layer_is_its_twin(name: str) -> None:
    ours, plain, x = _twins(name)
    assert isinstance(ours, type(plain))
    for training in (True, True, False) if "BatchNorm" in name or "InstanceNorm" in name else (True, True):
        y, found = _step(ours.train(training), x)
        expected, wanted = _step(plain.train(training), x)
        assert torch.equal(y, expected)
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).norm() <= 0.02 * b.norm()
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), plain.buffers(), strict=True))
    assert list(ours.state_dict()) == list(plain.state_dict())


ONE_OF_A_KIND = ("Linear", "Conv2d", "BatchNorm2d", "LayerNorm", "ReLU", "ELU", "Threshold", "MaxPool2d")
"""Of each way in which layers of torch keep their arguments."""


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_exact_settings_run_the_twin(name: str) -> None:
    ours, plain, x = _twins(name, EXACT)
    found, wanted = _step(ours, x), _step(plain, x)
    assert torch.equal(found[0], wanted[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_copies_keep_their_settings(name: str) -> None:
    ours, _, x = _twins(name)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert twin.settings == FINE
        assert torch.equal(twin(x.clone()), ours(x.clone()))


def test_matmul_layer() -> None:
    a, b = torch.randn(2, 8, 64, requires_grad=True), torch.randn(2, 64, 8, requires_grad=True)
    y = mn.MatMul(settings=FINE)(a, b)
    assert torch.equal(y, a @ b)
    y.sum().backward()
    grad = known(a.grad)
    assert (grad - b.detach().sum(-1).unsqueeze(1)).norm() < 0.02 * grad.norm()


def test_cross_entropy_layer() -> None:
    layer = mn.CrossEntropyLoss(label_smoothing=0.1, settings=FINE)
    logits, target = torch.randn(8, 64, requires_grad=True), torch.arange(8)
    loss = layer(logits, target)
    expected = nn.CrossEntropyLoss(label_smoothing=0.1)(logits, target)
    assert torch.equal(loss, expected)
    (found,), (wanted,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits)
    assert (found - wanted).norm() < 0.02 * wanted.norm()
    assert not torch.equal(found, wanted)


def test_policy_wins_inside_a_converted_model() -> None:
    x = torch.randn(64, 256)
    model = nn.Sequential(mn.Linear(256, 256, settings=LayerSettings(level=2)), mn.GELU(), mn.Linear(256, 4))
    plain = copy.deepcopy(model)
    for layer in plain:
        layer.__dict__["settings"] = EXACT
    wanted = _step(plain, x)[1]
    mt.convert(model, Policy.uniform(level=256), min_elements=0)
    found = _step(model, x)[1]
    assert 0 < (found[0] - wanted[0]).norm() < 0.02 * wanted[0].norm()


def test_every_layer_has_its_own_route() -> None:
    for name, (args, kwargs, _) in LAYERS.items():
        assert table.own_route(getattr(mn, name)(*args, **kwargs)) is not None
    assert table.own_route(mn.MatMul()) is not None


def test_description_names_the_settings() -> None:
    assert "out_features=16, bias=True, settings=8 bits / 64" in repr(mn.Linear(32, 16, settings=FINE))


def test_without_gradients_nothing_of_ours_runs() -> None:
    ours, plain, x = _twins("Linear")
    with torch.no_grad():
        assert torch.equal(ours(x), plain(x))


def test_layers_trace_in_one_graph() -> None:
    model = nn.Sequential(mn.Conv2d(3, 8, 3), mn.BatchNorm2d(8), mn.ReLU(), nn.Flatten(), mn.Linear(288, 4))
    x = torch.randn(4, 3, 8, 8)
    y = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, model(x))
    y.sum().backward()
