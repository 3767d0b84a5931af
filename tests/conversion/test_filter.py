"""`convert(filter_fn=…)`: layers of refused modules stay exact, as a policy that leaves them out would."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import mesa_tune as mt
from tests.builders import ViT, gpt2, gradients, policy_of, words
from tests.conformance.running import saved_bytes

X = torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(1))
FOUR_BITS = mt.Policy.uniform(level=16)


def convert(model: nn.Module, policy: mt.Policy = FOUR_BITS, **options: Any) -> nn.Module:
    return mt.convert(model, policy, seed=1, min_elements=0, **options)


def test_every_module_is_asked_by_its_name() -> None:
    asked: dict[str, nn.Module] = {}
    model = ViT()
    convert(model, filter_fn=lambda module, name: asked.setdefault(name, module) is module)
    assert asked == dict(model.named_modules())


def test_names_have_no_prefixes_of_wrappers() -> None:
    asked: dict[str, nn.Module] = {}
    model = torch.optim.swa_utils.AveragedModel(ViT())
    convert(model, filter_fn=lambda module, name: asked.setdefault(name, module) is not None)
    assert set(asked) == {name for name, _ in ViT().named_modules()}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_refused_layers_of_a_model_of_transformers_save_and_compute_as_plain(attention: str) -> None:
    plain: Any = gpt2(32, attn_implementation=attention)
    plain.eval()  # no dropout
    model, batch = copy.deepcopy(plain), words(4, 32)
    refused = {"", "lm_head", "transformer.ln_f"}  # the root computes the loss
    convert(model, filter_fn=lambda _, name: name not in refused)
    for each in (plain, model):
        each(**batch).loss.backward()
    parameters = dict(plain.named_parameters())
    exact = [name for name, p in model.named_parameters() if torch.equal(p.grad, parameters[name].grad)]
    assert exact == ["transformer.h.1.mlp.c_proj.bias", "transformer.ln_f.weight", "transformer.ln_f.bias"]


def test_a_filter_does_what_a_policy_by_names_does() -> None:
    names = ["blocks.0.fc1", "blocks.0.fc2"]
    filtered = ViT(depth=1)
    named = copy.deepcopy(filtered)
    convert(filtered, filter_fn=lambda _, name: name in names)
    convert(named, policy_of(f"on fc:\n    by_name: {' '.join(names)}\n    level: 16\n"))
    for _ in range(2):  # settings of calls are final from the second step on
        by_filter, by_name = gradients(filtered, X), gradients(named, X)
        assert all(torch.equal(gradient, by_name[name]) for name, gradient in by_filter.items())
    assert saved_bytes(filtered, X) == saved_bytes(named, X)


def test_a_refused_module_does_not_run_twice() -> None:
    text = "# mesa-tune policy 1\non module:\n    by_name: blocks.*\n    store: recompute\n"
    seen: dict[str, list[nn.Module]] = {"runs": []}  # too deep to be put back after a second run
    model = convert(ViT(), mt.Policy.parse(text), filter_fn=lambda _, name: name != "blocks.1")
    for block in model.blocks:  # type: ignore[union-attr]
        block.norm1.register_forward_hook(lambda module, *_: seen["runs"].append(module))
    gradients(model, X)
    assert [seen["runs"].count(block.norm1) for block in model.blocks] == [2, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_the_filter_and_converting_again_replaces_it(copied: Any) -> None:
    model = convert(ViT(), filter_fn=lambda _, name: not name.startswith("blocks"))
    filtered = saved_bytes(model, X)
    assert saved_bytes(copied(model), X) == filtered
    assert saved_bytes(convert(model), X) < 0.6 * filtered
