"""Modules that run again in backward, of models of transformers: with caches of keys, and checkpointed."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune import notice
from tests.builders import gpt2_config, llama, llama_config, t5_config

# With the names of blocks and of attention.
MODELS: dict[str, tuple[Any, Any, str, str]] = {
    "llama": (transformers.LlamaForCausalLM, llama_config(32, 1), "model.layers.*", "*.self_attn"),
    "gpt2": (transformers.GPT2LMHeadModel, gpt2_config(32, 1), "transformer.h.*", "*.attn"),
    "t5": (transformers.T5ForConditionalGeneration, t5_config(32), "decoder.block.*", "*.SelfAttention"),
}


def padded(samples: int = 4, length: int = 24) -> dict[str, Tensor]:
    ids = torch.randint(1, 64, (samples, length))
    mask = (torch.arange(length) < torch.linspace(3, length, samples)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def gradient(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    model.zero_grad()
    model(**batch).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def running_again(model: nn.Module, names: str, tile: int = 1) -> nn.Module:
    key = f"    tile: {tile}\n    store: exact\n" if tile > 1 else "    store: recompute\n"
    policy = mt.Policy.parse(f"# mesa-tune policy 1\non module:\n    by_name: {names}\n{key}")
    return mt.convert(copy.deepcopy(model), policy, seed=0, min_elements=10**9)


@pytest.mark.parametrize(
    ("name", "part", "tile"),
    [
        *(("llama", "blocks", 1), ("llama", "attention", 2), ("gpt2", "blocks", 2), ("gpt2", "attention", 1)),
        *(("t5", "blocks", 1), ("t5", "attention", 2)),
    ],
)
def test_the_second_run_adds_nothing_to_the_cache(name: str, part: str, tile: int) -> None:
    kind, config, blocks, attention = MODELS[name]
    assert config.use_cache
    model, batch = kind(config).train(mode=False), padded()
    network = running_again(model, blocks if part == "blocks" else attention, tile)
    torch.testing.assert_close(gradient(network, batch), gradient(model, batch), rtol=1e-4, atol=1e-5)


def test_without_gradients_the_cache_is_filled() -> None:
    model, batch = llama(32, 1), padded()
    network = running_again(model, "model.layers.*")
    with torch.no_grad():
        assert network(**batch).past_key_values.get_seq_length() == 24


def test_keys_of_an_earlier_forward_are_used() -> None:
    model, batch = llama(32, 1), padded()
    with torch.no_grad():
        known = model(input_ids=batch["input_ids"][:, :8]).past_key_values
    rest = {"input_ids": batch["input_ids"][:, 8:], "labels": batch["labels"][:, 8:]}
    network = running_again(model, "model.layers.*")
    notice._given.clear()
    with pytest.warns(UserWarning, match=r"'model.layers.0' does not run again: its cache has keys"):
        found = gradient(network, {**rest, "past_key_values": copy.deepcopy(known)})
    torch.testing.assert_close(found, gradient(model, {**rest, "past_key_values": copy.deepcopy(known)}))


@pytest.mark.parametrize("module", ["model", "model.layers.*"], ids=["around", "at"])
def test_modules_that_run_again_around_checkpoints_of_the_model(module: str) -> None:
    """The inner checkpoint compares what its two runs save; the outer one's first run saves in vain."""
    inside = "on fc matmul silu mul rmsnorm attention:\n    by_index: all\n    enable: True\n    level: 16\n"
    again = f"on module:\n    by_name: {module}\n    store: recompute\n"
    plain, batch = llama(64, 1).train(), padded()

    def steps(is_checkpointed: bool) -> list[tuple[Tensor, Tensor]]:
        model = copy.deepcopy(plain)
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        mt.convert(model, mt.Policy.parse(again + inside), seed=1, min_elements=1024)
        return [(model(**batch).loss.detach(), gradient(model, batch)) for _ in range(3)]

    for found, expected in zip(steps(True), steps(False), strict=True):
        assert all(map(torch.equal, found, expected))
