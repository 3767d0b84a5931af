"""ActNN's users: `actnn.set_optimization_level`, `actnn.QModule(model)`, and the loop stays as it is."""

import copy
import gc
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

from mesa_tune import notice
from mesa_tune.compat import actnn
from tests.builders import descend, known
from tests.compat_measures import error, gradient, saved_bytes
from tests.measure import models

Batch = tuple[Tensor, Tensor]


def resnet(*depths: int) -> Any:
    """A ResNet of bottleneck blocks for 10 classes, always the same."""
    torch.manual_seed(0)
    return models.resnet(*depths).train()


@pytest.fixture
def batch() -> Batch:
    torch.manual_seed(1)
    return torch.randn(8, 3, 48, 48), torch.randint(0, 10, (8,))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The loss; the gradient alone is compared, so batch norms may count on."""
    return F.cross_entropy(model(batch[0]).logits, batch[1])


@pytest.mark.parametrize(
    ("level", "share", "least", "most"),
    [
        *((level, 1.001, 0, 1e-12) for level in ("L0", "swap")),
        *(("L1", 0.62, 1e-6, 0.1), ("L2", 0.17, 1e-6, 0.1)),
        *((level, 0.11, 1e-4, 1) for level in ("L3", "L3.1", "L4", "L5")),
    ],
)
def test_levels(level: str, share: float, least: float, most: float, batch: Batch) -> None:
    plain = resnet(1, 1)
    actnn.set_optimization_level(level)
    model = actnn.QModule(copy.deepcopy(plain))
    assert torch.equal(loss_of(model, batch), loss_of(plain, batch))
    before = saved_bytes(plain, lambda: loss_of(plain, batch))
    assert saved_bytes(model, lambda: loss_of(model, batch)) < share * before
    exact = gradient(plain, lambda: loss_of(plain, batch))
    assert least <= error(gradient(model, lambda: loss_of(model, batch)), exact) < most
    assert list(model.state_dict()) == list(plain.state_dict())


def test_training_script(batch: Batch) -> None:
    actnn.set_optimization_level("L3")
    model = actnn.QModule(resnet(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    first = loss_of(model, batch)
    descend(optimizer, lambda: loss_of(model, batch), 2)
    assert loss_of(model, batch) < first


def test_a_resnet_of_50_layers_at_l3_keeps_a_tenth() -> None:
    """With an eighth of ResNet-50's channels."""
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[32, 64, 128, 256])
    plain: Any = ResNetForImageClassification(config).train()
    batch = torch.randn(4, 3, 64, 64), torch.randint(0, 2, (4,))
    before = saved_bytes(plain, lambda: loss_of(plain, batch))
    actnn.set_optimization_level("L3")
    model = actnn.QModule(plain)
    after = [saved_bytes(model, lambda: loss_of(model, batch)) for _ in range(2)]
    assert model.steps == 2
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
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.ConvTranspose2d(4, 4, 2, 2), nn.Linear(8, 8))
    weight = model[0].weight
    with pytest.warns(UserWarning, match=r"'1 \(GELU\)': ActNN has no layer for them"):
        actnn.QModule(model)
    assert model[0].weight is weight
    assert [type(layer).__name__ for layer in model] == ["QConv2d", "GELU", "QConvTranspose2d", "QLinear"]


def test_a_model_keeps_the_configuration_of_its_making(batch: Batch) -> None:
    actnn.set_optimization_level("L2")
    fine = actnn.QModule(resnet(1, 1))
    actnn.set_optimization_level("L3")
    coarse = actnn.QModule(resnet(1, 1))
    actnn.set_optimization_level("L0")
    sizes = [saved_bytes(model, lambda model=model: loss_of(model, batch)) for model in (fine, coarse)]  # type: ignore[misc]
    assert sizes[1] < 0.8 * sizes[0]


def test_bits_are_allotted_to_layers_at_the_same_average(batch: Batch) -> None:
    actnn.set_optimization_level("L3")
    model = actnn.QModule(resnet(2, 1))
    for _ in range(2):
        loss_of(model, batch).backward()
    schemes: list[Any] = [layer.scheme for layer in model.modules() if hasattr(layer, "scheme")]
    weighted = [scheme for scheme in schemes if isinstance(scheme, actnn.QScheme)]
    assert len({scheme.bits for scheme in weighted}) > 1
    average = sum(scheme.bits * scheme.dim for scheme in weighted) / sum(scheme.dim for scheme in weighted)
    assert 1.5 < average <= 2
    assert_norms_follow(model)


def assert_norms_follow(model: nn.Module) -> None:
    """A batch norm has the bits of the layer before."""
    norms = [layer.scheme for layer in model.modules() if isinstance(layer, actnn.QBatchNorm2d)]
    for norm in norms:
        assert isinstance(norm, actnn.QBNScheme)
        assert norm.bits == known(norm.prev_linear).bits
    assert norms


def test_allotting_lowers_the_error(batch: Batch) -> None:
    plain = resnet(2, 1)
    exact = gradient(plain, lambda: loss_of(plain, batch))
    errors = {}
    for perlayer in (False, True):
        actnn.config.perlayer = perlayer
        model = actnn.QModule(resnet(2, 1))
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


def test_loader_refuses_data_without_places() -> None:
    with pytest.raises(ValueError, match="yields indices"):
        actnn.DataLoader(Endless())
    with pytest.raises(ValueError, match="yields indices"):
        actnn.DataLoader(TensorDataset(torch.ones(1)), batch_size=None)


KERNELS = actnn.ops.ext_quantization
IMAGES, VOLUMES = (4, 4, 12, 12), (4, 4, 5, 5, 5)
CIRCULAR: dict[str, Any] = {"padding": 1, "padding_mode": "circular"}
TWINS: list[tuple[Any, Any, tuple[int, ...]]] = [
    (actnn.QConv1d(4, 6, 3), nn.Conv1d(4, 6, 3), (4, 4, 50)),
    (actnn.QConv2d(4, 6, 3, **CIRCULAR), nn.Conv2d(4, 6, 3, **CIRCULAR), IMAGES),
    (actnn.QConv3d(4, 6, 2), nn.Conv3d(4, 6, 2), VOLUMES),
    (actnn.QConvTranspose1d(4, 6, 3, stride=2), nn.ConvTranspose1d(4, 6, 3, stride=2), (4, 4, 50)),
    (actnn.QConvTranspose2d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3), IMAGES),
    (actnn.QConvTranspose3d(4, 6, 2), nn.ConvTranspose3d(4, 6, 2), VOLUMES),
    (actnn.QBatchNorm1d(16), nn.BatchNorm1d(16), (50, 16)),
    (actnn.QBatchNorm2d(4), nn.BatchNorm2d(4), IMAGES),
    (actnn.QBatchNorm3d(4), nn.BatchNorm3d(4), VOLUMES),
    (actnn.QLinear(32, 8, bias=False, group=1), nn.Linear(32, 8, bias=False), (20, 32)),
    (actnn.QReLU(inplace=True), nn.ReLU(), (20, 32)),
    (actnn.QDropout(0.5), nn.Dropout(0.5), (20, 32)),
    (actnn.QMaxPool2d(2), nn.MaxPool2d(2), IMAGES),
    (actnn.QAvgPool2d(2), nn.AvgPool2d(2), IMAGES),
    (KERNELS.act_quantized_relu, nn.ReLU(), IMAGES),
    (lambda x: KERNELS.act_quantized_max_pool2d(x, 2), nn.MaxPool2d(2), IMAGES),
    (lambda x: KERNELS.act_quantized_dropout(x, 0.2), nn.Dropout(0.2), IMAGES),
    (lambda x: actnn.ops.adaptive_avg_pool2d.apply(x, (1, 1)), nn.AdaptiveAvgPool2d(1), IMAGES),
]


@pytest.mark.parametrize(("ours", "plain", "shape"), TWINS, ids=lambda value: type(value).__name__)
def test_layers_and_exact_kernels_are_their_twins(ours: Any, plain: Any, shape: tuple[int, ...]) -> None:
    if isinstance(ours, nn.Module):
        plain.load_state_dict(ours.state_dict())
    x = torch.randn(shape)
    outputs, grads = list[Tensor](), list[Any]()
    for function in (ours, plain):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        outputs.append(function(leaf * 1))
        grads += torch.autograd.grad(outputs[-1], leaf, torch.randn(outputs[-1].shape))
    assert torch.equal(*outputs)
    # At 2 bits on average; what is kept of these enters the weights' gradients, or exactly.
    assert error(*grads) < (0.5 if isinstance(plain, nn.modules.batchnorm._BatchNorm) else 1e-10)


def test_variance_formula() -> None:
    """ActNN's C, halved at each bit more by the square of the levels, is the variance that is measured."""
    torch.manual_seed(0)
    actnn.config.activation_compression_bits, actnn.config.perlayer = [4], False
    layer, x, grad = actnn.QLinear(256, 16, bias=False), torch.randn(64, 256), torch.randn(64, 16)
    scheme = layer.scheme
    assert isinstance(scheme, actnn.QScheme)
    draws = [torch.autograd.grad(layer(x), layer.weight, grad)[0] for _ in range(50)]
    ends, squares = x.amax(1) - x.amin(1), grad.square().sum(1)
    expected = (256 / 6 * (ends / 15).square() * squares).sum().item()
    assert torch.stack(draws).var(0).sum().item() == pytest.approx(expected, rel=0.1)
    total = (256 / 4 * ends.square().sum() * squares.mean()).item()
    assert known(scheme.C).item() == pytest.approx(total, rel=1e-5)


def test_unknown_levels_and_fields_are_named() -> None:
    for level in ("L6", ""):
        with pytest.raises(ValueError, match="level must be one of L0, L1"):
            actnn.set_optimization_level(level)
    with pytest.warns(UserWarning, match=r"actnn\.config\.simulate means nothing here"):
        actnn.config.simulate = True
    with pytest.warns(UserWarning, match=r"actnn\.config\.group_szie .*ActNN has no such field"):
        actnn.config.group_szie = 2
    actnn.config.activation_compression_bits = [0]
    with pytest.raises(ValueError, match="at least 1"):
        actnn.QLinear(4, 4)


def test_more_than_8_bits_are_exact() -> None:
    actnn.config.activation_compression_bits = [16]
    x = torch.randn(8, 32)
    with pytest.warns(UserWarning, match="16 bits per element are stored as PyTorch stores them"):
        layer = actnn.QLinear(32, 4)
    exact = gradient(layer, lambda: F.linear(x, layer.weight, layer.bias).square().sum())
    assert torch.equal(gradient(layer, lambda: layer(x).square().sum()), exact)


def test_fields_assigned_later_count_for_layers_that_exist(batch: Batch) -> None:
    """As ActNN's program that measures variances does: exact and compressed gradients in turn."""
    plain = resnet(1, 1)
    exact = gradient(plain, lambda: loss_of(plain, batch))
    model = actnn.QModule(resnet(1, 1))
    errors = []
    for compress in (False, True, False):
        actnn.config.compress_activation = compress
        errors.append(error(gradient(model, lambda: loss_of(model, batch)), exact))
    assert errors[0] == errors[2] == 0
    assert errors[1] > 1e-4
    actnn.config.compress_activation = True
    actnn.config.adaptive_conv_scheme = actnn.config.adaptive_bn_scheme = False
    fixed = actnn.QModule(resnet(1, 1))
    sizes = []
    for bits in (2, 4, 8):
        actnn.config.activation_compression_bits[0] = bits
        sizes.append(saved_bytes(fixed, lambda: loss_of(fixed, batch)))
    assert sizes[0] < sizes[1] < sizes[2]
    actnn.config.training = False  # ActNN's word for evaluation
    assert torch.equal(gradient(fixed, lambda: loss_of(fixed, batch)), exact)


def test_use_gradient_may_begin_later() -> None:
    actnn.QScheme.num_samples = 10
    layer = actnn.QLinear(64, 64)
    actnn.config.use_gradient = True
    actnn.QScheme.batch = [3, 7]
    layer(torch.randn(2, 64)).square().sum().backward()
    assert isinstance(layer.scheme, actnn.QScheme)
    assert layer.scheme.scales.nonzero().flatten().tolist() == [3, 7]


def test_a_level_set_after_the_layers_says_that_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_given", set())
    actnn.QLinear(4, 4)
    with pytest.warns(UserWarning, match="existing layers do not take over the new level"):
        actnn.set_optimization_level("L2")


def test_environment_of_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, field in (("DEBUG_MEM", "debug_memory_model"), ("DEBUG_SPEED", "debug_speed")):
        assert getattr(actnn.QuantizationConfig(), field) is False
        monkeypatch.setenv(variable, "True")
        assert getattr(actnn.QuantizationConfig(), field) is True


def test_bits_are_allotted_to_all_layers_by_hand(batch: Batch) -> None:
    model = actnn.QModule(resnet(2, 1))
    loss_of(model, batch).backward()
    schemes = [layer.scheme for layer in model.modules() if isinstance(layer, actnn.QConv2d)]
    assert all(scheme in list(actnn.QScheme.layers) for scheme in schemes)
    assert len({scheme.bits for scheme in schemes if scheme is not None}) == 1
    actnn.QScheme.allocate_perlayer()
    actnn.QBNScheme.allocate_perlayer()
    assert len({scheme.bits for scheme in schemes if scheme is not None}) > 1
    assert_norms_follow(model)


def test_schemes_do_not_outlive_their_layers() -> None:
    before = len(actnn.QScheme.layers)
    layer = actnn.QLinear(4, 4)
    assert actnn.QScheme.layers[-1] is layer.scheme
    del layer
    gc.collect()
    assert len(actnn.QScheme.layers) <= before


def test_experiments_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = actnn.exp_recorder
    recorder.clear()
    recorder.record("network", "resnet50")
    recorder.record("ips", np.float64(1.23456), 2)
    recorder.record("batch_size", np.int64(4))
    assert recorder.val_dict["ips"] == 1.23
    for _ in range(2):
        recorder.dump(tmp_path / "speed.json")
    lines = (tmp_path / "speed.json").read_text().splitlines()
    assert [json.loads(line) for line in lines] == 2 * [{"network": "resnet50", "ips": 1.23, "batch_size": 4}]
    assert "speed.json" in capsys.readouterr().out


OP: Any = actnn.ops
OPS: dict[str, tuple[Any, Any, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "conv1d": (OP.conv1d, F.conv1d, (4, 4, 30), (6, 4, 3), (2, 1, 1, 1)),
    "conv2d": (OP.conv2d, F.conv2d, IMAGES, (6, 4, 3, 3), (1, 1, 1, 1)),
    "conv3d": (OP.conv3d, F.conv3d, VOLUMES, (6, 4, 2, 2, 2), (1, 0, 1, 1)),
    "conv_transpose2d": (OP.conv_transpose2d, F.conv_transpose2d, IMAGES, (4, 6, 3, 3), (2, 1, 1, 1, 1)),
    "linear": (OP.linear, F.linear, (40, 32), (6, 32), ()),
}


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("name", OPS)
def test_functions_as_the_tests_call_them(name: str, adaptive: bool) -> None:
    op, plain, shape, weight_shape, more = OPS[name]
    actnn.config.activation_compression_bits = [8]
    scheme = actnn.QScheme(None) if adaptive else None
    x, weight, bias = torch.randn(shape), torch.randn(weight_shape), torch.randn(6)
    outputs, grads = [], []
    for call in (lambda *given: op.apply(*given, scheme), plain):
        leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
        outputs.append(call(*leaves, *more))
        grads.append(torch.autograd.grad(outputs[-1].square().sum(), leaves))
    assert torch.equal(*outputs)
    torch.testing.assert_close(grads[0][::2], grads[1][::2])  # what the weight makes of it is exact
    assert 0 < error(grads[0][1], grads[1][1]) < 1e-3
    assert scheme is None or scheme.C is not None


def test_batch_norm_as_the_tests_call_it() -> None:
    x = torch.randn(8, 4, 7, 7, requires_grad=True)
    given = (x, None, None, torch.rand(4), torch.rand(4), True, 0.1, 1e-5)
    outputs = actnn.ops.batch_norm.apply(*given, actnn.QBNScheme()), F.batch_norm(*given)
    head = torch.randn(x.shape)
    grads = [torch.autograd.grad(output, x, head)[0] for output in outputs]
    assert 0 < error(*grads) < 0.5


@pytest.mark.parametrize("transposed", [False, True])
def test_backward_functions(transposed: bool) -> None:
    x, weight = torch.randn(4, 6, 9, 9, requires_grad=True), torch.randn(6, 6, 3, 3, requires_grad=True)
    module: Any = actnn.ops.ext_backward_func
    sizes: tuple[Any, ...]
    ones, twos, more = (1, 1), (2, 2), (1, False, False, False, [True, True])
    if transposed:
        y = F.conv_transpose2d(x, weight, None, 2, 1, 1)
        backward, sizes = module.cudnn_convolution_transpose_backward, (ones, ones, twos, ones)
    else:
        y = F.conv2d(x, weight, None, 2, 1)
        backward, sizes = module.cudnn_convolution_backward, (ones, twos, ones)
    head = torch.randn(y.shape)
    found = backward(x, head, weight, *sizes, *more)
    for one, other in zip(found, torch.autograd.grad(y, (x, weight), head), strict=True):
        torch.testing.assert_close(one, other)


def test_kernels_of_one_width() -> None:
    data = torch.randn(3, 5, 64)
    low, high = (each.view(3, 5, 1) for each in actnn.ops.ext_minimax.minimax(data.view(-1, 64)))
    assert torch.equal(high, data.amax(2, keepdim=True))
    packed, scale = actnn.ops.ext_quantization.pack_single_precision(data, low, high, 4, True)
    decoded = actnn.ops.ext_quantization.unpack_single_precision(packed, 4, scale, low, 3, 5, 64)
    assert packed.numel() == data.numel() // 2
    assert ((decoded - data).abs() <= (high - low) / 15 * 1.001).all()


@pytest.mark.parametrize("adaptive", [True, False])
def test_activations_are_quantized_as_layers_do(adaptive: bool) -> None:
    actnn.config.activation_compression_bits = [4]
    x = torch.randn(6, 3, 16, 16)
    stored = actnn.ops.quantize_activation(x, actnn.QScheme(None) if adaptive else None)
    q_input, _, q_scale, q_min = stored
    assert actnn.compute_tensor_bytes([q_input]) <= x.numel() // 2
    assert q_scale.shape == q_min.shape == (x.numel() // 256,)
    assert 0 < error(actnn.ops.dequantize_activation(stored, x.shape), x) < 0.04
    actnn.config.compress_activation = False
    assert actnn.ops.quantize_activation(x)[0] is x


def test_kernels_that_are_not_here_say_why() -> None:
    with pytest.raises(AttributeError, match=r"ops\.sync_batch_norm: not supported: .*QSyncBatchNorm"):
        _ = actnn.ops.sync_batch_norm
    with pytest.raises(ImportError):
        from mesa_tune.compat.actnn.ops import quantize_and_pack  # noqa: F401


def test_memory_helpers(capsys: pytest.CaptureFixture[str]) -> None:
    assert actnn.get_memory_usage(print_info=True) > 0
    assert "MB" in capsys.readouterr().out
    assert actnn.compute_tensor_bytes([torch.zeros(3), torch.zeros(5, dtype=torch.int8)]) == 17
    assert actnn.compute_tensor_bytes(torch.zeros(3, dtype=torch.bfloat16)) == 6
