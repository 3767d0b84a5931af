"""ActNN's users: `actnn.set_optimization_level`, `actnn.QModule(model)`, and the loop stays as it is."""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

from mesa_tune.compat import actnn
from tests.compat_measures import error, gradient, saved_bytes


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    plain = actnn.QuantizationConfig()
    for entry in fields(plain):
        setattr(actnn.config, entry.name, getattr(plain, entry.name))
    actnn.QScheme.num_samples, actnn.QScheme.batch = 1, None


def resnet(*depths: int, sizes: tuple[int, ...] = (32, 64)) -> Any:
    """A ResNet of bottleneck blocks for 10 classes, always the same."""
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=16, hidden_sizes=list(sizes), depths=list(depths))
    config.num_labels = 10
    return ResNetForImageClassification(config).train()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss; the gradient alone is compared, so batch norms may count on."""
    return F.cross_entropy(model(batch[0]).logits, batch[1])


@pytest.mark.parametrize(
    ("level", "share", "least", "most"),
    [
        ("L0", 1.001, 0, 1e-12),
        ("L1", 0.62, 1e-6, 0.1),
        ("L2", 0.17, 1e-6, 0.1),
        ("L3", 0.11, 1e-4, 1),
        ("L3.1", 0.11, 1e-4, 1),
        ("L4", 0.11, 1e-4, 1),
        ("L5", 0.11, 1e-4, 1),
        ("swap", 1.001, 0, 1e-12),
    ],
)
def test_training_script(
    level: str, share: float, least: float, most: float, batch: tuple[Tensor, Tensor]
) -> None:
    plain = resnet(1, 1)
    model = copy.deepcopy(plain)
    keys = list(plain.state_dict())
    actnn.set_optimization_level(level)
    model = actnn.QModule(model)
    assert torch.equal(loss_of(model, batch), loss_of(plain, batch))
    before = saved_bytes(plain, lambda: loss_of(plain, batch))
    assert saved_bytes(model, lambda: loss_of(model, batch)) < share * before
    exact = gradient(plain, lambda: loss_of(plain, batch))
    assert least <= error(gradient(model, lambda: loss_of(model, batch)), exact) < most
    assert list(model.state_dict()) == keys
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    first = loss_of(model, batch)
    for _ in range(4):
        optimizer.zero_grad()
        value = loss_of(model, batch)
        value.backward()
        optimizer.step()
    assert loss_of(model, batch) < first


def test_resnet50_at_l3_keeps_a_tenth() -> None:
    torch.manual_seed(0)
    plain: Any = ResNetForImageClassification(ResNetConfig()).train()
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(0, 2, (4,))
    before = saved_bytes(plain, lambda: F.cross_entropy(plain(images).logits, labels))
    actnn.set_optimization_level("L3")
    model = actnn.QModule(plain)
    after = [saved_bytes(model, lambda: F.cross_entropy(model(images).logits, labels)) for _ in range(3)]
    assert model.steps == 3
    assert max(after) * 10 <= before


def test_the_plain_models_checkpoint_loads_and_back() -> None:
    plain = resnet(1, 1)
    model = actnn.QModule(resnet(1, 1))
    state = {key: value + 1 for key, value in plain.state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    plain.load_state_dict(model.state_dict())
    outer = nn.ModuleDict({"net": model})
    assert list(outer.state_dict()) == [f"net.{key}" for key in state]
    outer.load_state_dict({f"net.{key}": value - 1 for key, value in state.items()})
    assert torch.equal(model.state_dict()["classifier.1.bias"], state["classifier.1.bias"] - 1)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**state, "other": torch.ones(1)})


def test_conversion_keeps_weights_and_names_what_stays() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.ConvTranspose2d(4, 4, 2, 2), nn.Linear(8, 8)
    )
    weight = model[0].weight
    with pytest.warns(UserWarning, match=r"'1 \(GELU\)': ActNN has no layer for them"):
        actnn.QModule(model)
    assert model[0].weight is weight
    kinds = [type(layer).__name__ for layer in model]
    assert kinds == ["QConv2d", "GELU", "QConvTranspose2d", "QLinear"]


def test_a_model_keeps_the_configuration_of_its_making(batch: tuple[Tensor, Tensor]) -> None:
    actnn.set_optimization_level("L2")
    fine = actnn.QModule(resnet(1, 1))
    actnn.set_optimization_level("L3")
    coarse = actnn.QModule(resnet(1, 1))
    actnn.set_optimization_level("L0")
    sizes = [saved_bytes(model, lambda model=model: loss_of(model, batch)) for model in (fine, coarse)]  # type: ignore[misc]
    assert sizes[1] < 0.8 * sizes[0]


def test_bits_are_allotted_to_layers_at_the_same_average(batch: tuple[Tensor, Tensor]) -> None:
    actnn.set_optimization_level("L3")
    model = actnn.QModule(resnet(2, 1))
    for _ in range(2):
        loss_of(model, batch).backward()
    schemes: list[Any] = [layer.scheme for layer in model.modules() if hasattr(layer, "scheme")]
    weighted = [scheme for scheme in schemes if isinstance(scheme, actnn.QScheme)]
    bits: list[int] = [scheme.bits for scheme in weighted]
    sizes: list[int] = [scheme.dim for scheme in weighted]
    assert len(set(bits)) > 1
    average = sum(bit * size for bit, size in zip(bits, sizes, strict=True)) / sum(sizes)
    assert 1.5 < average <= 2
    norms = [scheme for scheme in schemes if isinstance(scheme, actnn.QBNScheme)]
    assert all(norm.prev_linear is not None and norm.bits == norm.prev_linear.bits for norm in norms)


def test_allotting_lowers_the_error(batch: tuple[Tensor, Tensor]) -> None:
    plain = resnet(2, 2)
    exact = gradient(plain, lambda: loss_of(plain, batch))
    errors = {}
    for perlayer in (False, True):
        actnn.config.perlayer = perlayer
        model = actnn.QModule(resnet(2, 2))
        gradient(model, lambda model=model: loss_of(model, batch))  # type: ignore[misc]
        draws = [gradient(model, lambda model=model: loss_of(model, batch)) for _ in range(3)]  # type: ignore[misc]
        errors[perlayer] = sum(error(draw, exact) for draw in draws)
    assert errors[True] < errors[False]


def test_samples_are_weighted_by_their_gradients() -> None:
    torch.manual_seed(0)
    actnn.config.use_gradient = True
    actnn.QScheme.num_samples = 20
    images, labels = torch.randn(20, 8), torch.arange(20) % 4
    loader = actnn.DataLoader(TensorDataset(images, labels), batch_size=5, shuffle=True)
    model = actnn.QModule(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)))
    seen: list[int] = []
    for index, (x, y) in loader:
        assert torch.equal(x, images[index])
        actnn.QScheme.batch = index
        F.cross_entropy(model(x), y).backward()
        seen += index
    assert sorted(seen) == list(range(20))
    scheme = model.model[2].scheme  # type: ignore[index]
    assert (scheme.scales > 0).all()
    assert scheme.get_scale().shape == (5,)


def test_use_gradient_says_what_it_needs() -> None:
    actnn.config.use_gradient = True
    with pytest.raises(ValueError, match=r"QScheme\.num_samples"):
        actnn.QLinear(4, 4)
    actnn.QScheme.num_samples = 10
    layer = actnn.QLinear(64, 64)
    with pytest.raises(ValueError, match=r"QScheme\.batch"):
        layer(torch.randn(2, 64))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    "given", [{"dataset": Endless()}, {"dataset": [1], "batch_size": None}], ids=["it", "none"]
)
def test_loader_refuses_data_without_places(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="yields indices"):
        actnn.DataLoader(**given)


@pytest.mark.parametrize(
    ("layer", "twin", "shape"),
    [
        (actnn.QConv1d(4, 6, 3), nn.Conv1d(4, 6, 3), (4, 4, 50)),
        (actnn.QConv2d(4, 6, 3, padding_mode="circular", padding=1), None, (4, 4, 12, 12)),
        (actnn.QConv3d(4, 6, 2), nn.Conv3d(4, 6, 2), (4, 4, 5, 5, 5)),
        (actnn.QConvTranspose1d(4, 6, 3, stride=2), nn.ConvTranspose1d(4, 6, 3, stride=2), (4, 4, 50)),
        (actnn.QConvTranspose2d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3), (4, 4, 9, 9)),
        (actnn.QConvTranspose3d(4, 6, 2), nn.ConvTranspose3d(4, 6, 2), (4, 4, 5, 5, 5)),
        (actnn.QBatchNorm1d(16), nn.BatchNorm1d(16), (50, 16)),
        (actnn.QBatchNorm2d(4), nn.BatchNorm2d(4), (4, 4, 12, 12)),
        (actnn.QBatchNorm3d(4), nn.BatchNorm3d(4), (4, 4, 5, 5, 5)),
        (actnn.QLinear(32, 8, bias=False, group=1), nn.Linear(32, 8, bias=False), (20, 32)),
        (actnn.QReLU(inplace=True), nn.ReLU(), (20, 32)),
        (actnn.QDropout(0.5), nn.Dropout(0.5), (20, 32)),
        (actnn.QMaxPool2d(2), nn.MaxPool2d(2), (4, 4, 12, 12)),
        (actnn.QAvgPool2d(2), nn.AvgPool2d(2), (4, 4, 12, 12)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_are_their_twins(layer: nn.Module, twin: nn.Module | None, shape: tuple[int, ...]) -> None:
    twin = twin or nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular")
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(shape)
    outputs, grads = [], []
    for module in (layer, twin):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        outputs.append(module(leaf * 1))
        outputs[-1].backward(torch.randn(outputs[-1].shape))
        assert leaf.grad is not None
        grads.append(leaf.grad)
    assert torch.equal(*outputs)
    # At 2 bits on average; what is kept of these enters the weights' gradients, or exactly.
    assert error(grads[0], grads[1]) < (0.5 if isinstance(twin, nn.modules.batchnorm._BatchNorm) else 1e-10)


def test_variance_formula() -> None:
    """ActNN's C, halved at each bit more by the square of the levels, is the variance that is measured."""
    torch.manual_seed(0)
    actnn.config.activation_compression_bits = [4]
    actnn.config.perlayer = False
    layer, x = actnn.QLinear(256, 16, bias=False), torch.randn(64, 256)
    grad = torch.randn(64, 16)
    scheme = layer.scheme
    assert isinstance(scheme, actnn.QScheme)
    draws = []
    for _ in range(200):
        layer.zero_grad()
        layer(x).backward(grad)
        assert layer.weight.grad is not None
        draws.append(layer.weight.grad.clone())
    measured = torch.stack(draws).var(0).sum().item()
    ends = x.amax(1) - x.amin(1)
    squares = grad.square().sum(1)
    expected = (256 / 6 * (ends / 15).square() * squares).sum().item()
    assert measured == pytest.approx(expected, rel=0.1)
    layer_c = scheme.C
    assert layer_c is not None
    assert layer_c.item() == pytest.approx((256 / 4 * ends.square().sum() * squares.mean()).item(), rel=1e-5)


@pytest.mark.parametrize("level", ["L6", ""])
def test_unknown_levels(level: str) -> None:
    with pytest.raises(ValueError, match="level must be one of L0, L1"):
        actnn.set_optimization_level(level)


def test_unsupported_fields_are_named() -> None:
    actnn.config.simulate = True
    with pytest.warns(UserWarning, match=r"actnn\.config\.simulate means nothing here"):
        actnn.QReLU()
    actnn.config.activation_compression_bits = [16]
    with pytest.raises(ValueError, match="from 1 to 8"):
        actnn.QLinear(4, 4)


def test_memory_helpers(capsys: pytest.CaptureFixture[str]) -> None:
    assert actnn.get_memory_usage(print_info=True) > 0
    assert "MB" in capsys.readouterr().out
    assert actnn.compute_tensor_bytes([torch.zeros(3), torch.zeros(5, dtype=torch.int8)]) == 17
    assert actnn.compute_tensor_bytes(torch.zeros(3, dtype=torch.bfloat16)) == 6
