"""A profile needs hardly more memory than the step that it measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiler.memory.meter import Meter
from mesa_tune.workload.preserve import preserved
from mesa_tune.workload.workload import Workload

OPTIONS = [LayerSettings(level=4), LayerSettings(level=16)]
MOST = 1.3


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    result: Tensor = model(tokens, labels=tokens).loss
    return result


def gpt2(batch_size: int, length: int, **config: Any) -> dict[str, Any]:
    made = transformers.GPT2Config(
        vocab_size=128, n_positions=length, n_head=2, bos_token_id=0, eos_token_id=0, **config
    )
    return {
        "model": lambda: transformers.GPT2LMHeadModel(made),
        "batch": lambda n: torch.randint(128, (n, length)),
        "loss": loss,
        "batch_size": batch_size,
    }


CASES = {
    "activations": gpt2(4, 96, n_embd=32, n_layer=2),
    "weights": gpt2(2, 8, n_embd=96, n_layer=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_profile_takes_little_more_memory_than_the_step(case: dict[str, Any]) -> None:
    with Meter() as meter:
        made = mt.profile(Workload(**case), options=OPTIONS, seeds=1)
    assert any(option.gradient_error for layer in made.layers for option in layer.options)
    assert meter.high_water < MOST * made.peak_bytes


MODEL = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
MODELS: dict[str, Callable[[], nn.Module]] = {
    "one model": lambda: MODEL,
    "one model in another": lambda: nn.Sequential(MODEL),
    "weights of no seed": lambda: nn.Sequential(nn.Linear(64, 8, dtype=torch.float32).apply(_reset)),
}
GENERATOR = torch.Generator()


def _reset(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=GENERATOR)


@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
def test_a_model_that_cannot_be_built_again_is_restored(make: Callable[[], nn.Module]) -> None:
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made.append(make())
        return made[-1]

    before = [parameter.clone() for parameter in MODEL.parameters()]
    mt.profile(
        Workload(model, lambda n: torch.randn(n, 64), lambda m, x: m(x).square().mean(), batch_size=128),
        options=OPTIONS,
        seeds=1,
    )
    assert len(made) == 2  # the second, to see whether the first can be built again
    assert all(map(torch.equal, before, MODEL.parameters()))


@pytest.mark.parametrize("rebuilt", [False, True], ids=["copied", "built again"])
def test_everything_is_restored(rebuilt: bool) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    model = build()
    weight = model.get_parameter("0.weight")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(torch.randn(4, 8)).square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.load_state_dict(before)
    optimizer = torch.optim.AdamW(model.parameters())
    with preserved(model, optimizer, build if rebuilt else None) as restore:
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        assert not torch.equal(weight, before["0.weight"])
        restore()
        assert torch.equal(weight, before["0.weight"])
        assert weight.grad is None
        model.eval()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    restored = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, restored, gradients))
    assert len(restored) == 4
    assert model.training
    assert not optimizer.state


class _Patches(nn.Module):
    """A convolution of images, and linear layers on images with the channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.patches(x).permute(0, 2, 3, 1)).mean((1, 2))
        return y


@pytest.mark.parametrize("groups", [3, 4, 7])
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_layers_whose_channels_are_not_divided_are_predicted(autocast: str | None, groups: int) -> None:
    """Images have 3 channels, then 7 rows of pixels, weights 64 or 256 columns: no number divides all."""
    work = mt.Workload(
        _Patches,
        lambda n: torch.randn(n, 3, 28, 28),
        lambda model, x: model(x).square().mean(),
        batch_size=16,
        autocast=autocast,
    )
    policy = mt.Policy.uniform(level=16, group_size=None, quant_groups=groups)
    predicted = mt.profile(work, options=[]).predict(policy)
    measured = mt.verify(work, policy, steps=1, seeds=1).policy
    assert measured.saved_bytes is not None
    assert measured.peak_bytes is not None
    assert abs(predicted.saved_bytes - measured.saved_bytes) <= 64
    assert abs(predicted.peak_bytes - measured.peak_bytes) <= 0.003 * measured.peak_bytes
