"""A profile needs hardly more memory than the step that it measures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import mesa_tune as mt
from mesa_tune.measure import pricing
from mesa_tune.measure.memory.meter import Meter
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.workload.preserve import preserved
from tests.builders import gpt2, own_loss, words, workload
from tests.step_memory import Composed, measured, squares

OPTIONS = [LayerSettings(level=4), LayerSettings(level=16)]
MOST = 1.3


@pytest.mark.parametrize(
    ("size", "length", "width", "layers"),
    [(4, 96, 32, 1), pytest.param(2, 8, 96, 2, marks=pytest.mark.slow("sweep"))],
)
@pytest.mark.parametrize(("free", "most"), [(0, MOST), (1 << 40, 2 * MOST)], ids=["scarce", "plenty"])
def test_a_profile_takes_little_more_memory_than_the_step(
    size: int, length: int, width: int, layers: int, free: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one model, activations take most; of the other, weights. With enough room it takes twice as much."""
    monkeypatch.setattr(pricing, "free_memory", lambda _: (free, "of a test"))
    model = lambda: gpt2(width, layers, n_positions=length)  # noqa: E731
    work = workload(model, lambda n: words(n, length), own_loss, batch_size=size)
    with Meter() as meter:
        made = mt.profile(work, options=OPTIONS, seeds=1)
    assert any(option.gradient_error for layer in made.layers for option in layer.options)
    assert meter.tensor_peak < most * made.peak_bytes


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
    work = workload(model, lambda n: torch.randn(n, 64), squares, batch_size=128)
    mt.profile(work, options=OPTIONS[:1], seeds=1)
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


@pytest.mark.parametrize(("autocast", "groups"), [(None, 7), ("bfloat16", 3), (None, 4)])
def test_layers_whose_channels_are_not_divided_are_predicted(autocast: str | None, groups: int) -> None:
    """Images have 3 channels, then 7 rows of pixels, weights 64 or 256 columns: no number divides all."""

    def build() -> nn.Module:
        mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        forward = lambda m, x: m.mlp(m.patches(x).permute(0, 2, 3, 1)).mean((1, 2))  # noqa: E731
        return Composed(forward, patches=nn.Conv2d(3, 64, 4, 4), mlp=mlp)

    work = workload(build, lambda n: torch.randn(n, 3, 28, 28), squares, batch_size=16, autocast=autocast)
    policy = mt.Policy.uniform(level=16, group_size=None, quant_groups=groups)
    predicted, found = mt.profile(work, options=[]).predict(policy), measured(work, policy)
    assert abs(predicted.saved_bytes - found.saved_bytes) <= 64
    assert abs(predicted.peak_bytes - found.peak_bytes) <= 0.003 * found.peak_bytes
