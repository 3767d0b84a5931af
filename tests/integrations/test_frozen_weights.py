"""Adapters on frozen weights: PEFT's LoRA, and weights that are stored in fewer bits (QLoRA).

The weights of torchao and bitsandbytes are tested where these are installed; what is special about
torchao's, a class of tensors with functions of their own, always.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.conversion.layers import Catalog
from mesa_tune.integrations.transformers import MesaTuneCallback
from tests.builders import gradients, workload
from tests.conformance.running import relative_error
from tests.integrations.conftest import CAMPAIGN, FOUR_BITS
from tests.integrations.test_transformers import (
    assert_begins_nearly_as,
    assert_within_a_budget,
    text_model,
    trained,
)

X = torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(1))


class EightBits(Tensor):
    """A weight in 8 bits per element, which computes its own linear layer, as torchao's do."""

    integers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, integers: Tensor, scale: Tensor) -> EightBits:
        made: EightBits = Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype)
        made.integers, made.scale = integers, scale
        return made

    @classmethod
    def of(cls, weight: Tensor) -> nn.Parameter:
        """Return a frozen parameter with the rounded values of `weight`."""
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        integers = (weight.detach() / scale).round().to(torch.int8)
        return nn.Parameter(cls(integers, scale), requires_grad=False)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.integers * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            weight: EightBits = args[0]
            return cls(func(weight.integers), func(weight.scale))
        if func is torch.ops.aten.copy_.default:
            func(args[0].integers, args[1].integers)
            func(args[0].scale, args[1].scale)
            return args[0]
        raise NotImplementedError(f"EightBits has no {func}")


def network() -> nn.Sequential:
    """Trainable layers around one whose weight will be frozen."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.GELU(), nn.Linear(64, 64))


def own() -> nn.Module:
    model = network()
    layer: Any = model[1]
    layer.weight = EightBits.of(layer.weight)
    return model


def by_torchao(config: str) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = network().requires_grad_()
    model[1].requires_grad_(False)
    chosen = getattr(quantization, config)()
    quantization.quantize_(model, chosen, filter_fn=lambda _, name: name == "1")
    return model


def by_bitsandbytes(kind: str, **options: Any) -> nn.Module:
    layers = pytest.importorskip("bitsandbytes").nn
    model = network()
    layer = getattr(layers, kind)(64, 64, bias=False, **options)
    layer.load_state_dict(model[1].state_dict())
    model[1] = layer.requires_grad_(False)
    return model.to("cpu")  # quantizes


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a class of tensors": own,
    "torchao, int8": lambda: by_torchao("Int8WeightOnlyConfig"),
    "torchao, int8 activations": lambda: by_torchao("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes, 4 bits": lambda: by_bitsandbytes("Linear4bit", compute_dtype=torch.float32),
    "bitsandbytes, 8 bits": lambda: by_bitsandbytes("Linear8bitLt", has_fp16_weights=False),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_layers_around_frozen_weights_of_fewer_bits_train(name: str) -> None:
    plain, model = MODELS[name](), MODELS[name]()
    right = gradients(plain, X)
    assert right.keys() >= {"3.weight", "3.bias"}  # through activations in 8 bits, torchao sends no gradient
    mt.convert(model, FOUR_BITS, min_elements=0)
    assert torch.equal(model(X), plain(X))
    for _ in range(2):
        found = gradients(model, X)
        assert found.keys() == right.keys()
        assert 1e-5 < relative_error(found, right) < 0.05


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_profile_counts_frozen_weights_of_fewer_bits_as_no_activations(name: str) -> None:
    work = workload(MODELS[name], lambda n: X[:n], lambda model, x: model(x).square().mean())
    profile = mt.profile(work, options=[])
    stored = {layer.name: layer.own_bytes for layer in profile.layers}
    assert stored["3"] == X.nbytes
    assert stored.get("1", 0) == 0
    assert {entry.layer for entry in profile.exact} <= {"1.linear.0", "unattributed"}


def adapted(model: Any) -> Any:
    torch.manual_seed(3)  # of the adapters
    lora = peft.LoraConfig(target_modules=["c_attn", "c_fc"], r=4, fan_in_fan_out=True)
    return peft.get_peft_model(model, lora)


def test_a_trainer_with_adapters_and_checkpointing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"activation_checkpointing": True}
    plain = trained(tmp_path, model=adapted(text_model()), **options)
    run = trained(tmp_path, MesaTuneCallback(FOUR_BITS), model=adapted(text_model()), **options)
    assert_begins_nearly_as(run, plain)


@CAMPAIGN
def test_adapters_train_within_a_budget(tmp_path: Path) -> None:
    assert_within_a_budget(tmp_path, lambda: adapted(text_model()))


def test_frozen_layers_store_nothing_and_names_have_no_prefix() -> None:
    model = adapted(text_model(dropout=0.0))
    inner = copy.deepcopy(model).base_model.model
    assert Catalog.of(model).fingerprint == Catalog.of(inner).fingerprint
    ids = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(1))
    work = workload(lambda: model, lambda n: ids[:n], lambda m, x: m(x, labels=x).loss)
    stored = {layer.name: layer.own_bytes for layer in mt.profile(work, options=[]).layers}
    assert not any(name.startswith(("base_model", "model.")) for name in stored)
    block = "transformer.h.0"
    assert stored.get(f"{block}.mlp.c_proj", 0) == 0  # its weight is frozen
    assert stored[f"{block}.mlp.c_fc.lora_A.default"] > 0
