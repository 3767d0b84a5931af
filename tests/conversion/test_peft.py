"""LoRA by PEFT on a model of transformers, converted before and after `get_peft_model`."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import mesa_tune as mt
from mesa_tune.conversion.layers import Catalog
from mesa_tune.conversion.model import conversion_of
from tests.builders import conversion, gradients, llama, own_loss
from tests.conformance.running import relative_error

IDS = torch.randint(0, 100, (4, 32), generator=torch.Generator().manual_seed(1))
TARGETS = ["q_proj", "v_proj", "down_proj"]
LORA = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS, r=4, init_lora_weights=False)
ORDERS = pytest.mark.parametrize("first", [True, False], ids=["convert first", "adapt first"])


def base() -> Any:
    torch.manual_seed(0)
    return llama(64, 1, use_cache=False)


def adapted(model: Any) -> Any:
    torch.manual_seed(3)  # of the adapters
    return peft.get_peft_model(model, LORA)


def convert(model: Any) -> Any:
    return mt.convert(model, mt.Policy.uniform(level=16), seed=1, min_elements=0)


def made(first: bool) -> Any:
    return adapted(convert(base())) if first else convert(adapted(base()))


def logits(model: Any) -> Any:
    return model(input_ids=IDS).logits


def grads(model: Any) -> dict[str, Tensor]:
    return gradients(model, run=lambda: own_loss(model, {"input_ids": IDS, "labels": IDS}))


@ORDERS
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_adapters_train(first: bool, checkpointing: bool) -> None:
    plain, model = adapted(base()), made(first)
    right = grads(plain)
    assert torch.equal(logits(model), logits(plain))
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    for _ in range(3):
        assert 1e-3 < relative_error(grads(model), right) < 0.1
    assert grads(model).keys() == right.keys()
    assert relative_error(grads(mt.revert(model)), right) < 1e-12


@ORDERS
def test_what_peft_does_with_a_model_it_does_with_a_converted_one(first: bool) -> None:
    plain, model = adapted(base()), made(first)
    assert model.state_dict().keys() == plain.state_dict().keys()
    own, others = (peft.get_peft_model_state_dict(each) for each in (model, plain))
    assert all(torch.equal(own[name], others[name]) for name in others)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(base()))
    merged, right = (each.merge_and_unload().requires_grad_() for each in (model, plain))
    assert conversion_of(merged) is not None
    assert torch.equal(logits(merged), logits(right))
    assert 1e-3 < relative_error(grads(merged), grads(right)) < 0.1


def test_adapters_are_layers_and_wrappers_are_none() -> None:
    model = made(first=False)
    logits(model)
    layers = conversion(model).catalog.layers()
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    adapters = ("base_layer", "lora_A.default", "lora_B.default")
    assert {name for tag, _, name in layers if tag == "fc" and "layers.0" in name} == {
        *(f"{attention}.{name}" for name in ("k_proj", "o_proj")),
        *(f"{mlp}.{name}" for name in ("gate_proj", "up_proj")),
        *(f"{attention}.{name}.{part}" for name in ("q_proj", "v_proj") for part in adapters),
        *(f"{mlp}.down_proj.{part}" for part in adapters),
    }


def test_a_policy_of_the_plain_model_is_refused_where_adapters_were_added() -> None:
    text = "# mesa-tune policy 1\n# model Llama (layers {})\non fc:\n    by_name: lm_head\n    level: 16\n"
    policy = mt.Policy.parse(text.format(Catalog.of(base()).fingerprint))
    with pytest.raises(mt.PolicyError, match=r"another model(.|\n)*force=True"):
        mt.convert(adapted(base()), policy)
    mt.convert(adapted(base()), policy, force=True)
