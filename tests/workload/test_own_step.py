"""The user's own training step: whatever it does, it is measured, priced and predicted as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import mesa_tune as mt
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.policy.settings import EXACT
from mesa_tune.workload.user_code import mixed_seed, seeded
from tests.builders import known, mean_error, no_trace
from tests.step_memory import Composed, second_step, swept, without_variants

WIDTH, BATCH = 64, 96
PLAIN, FOUR_BITS = mt.Policy.parse(""), mt.Policy.uniform(level=16)
OPTIONS = [mt.LayerSettings(level=level) for level in (4, 16)]


def net() -> nn.Module:
    """A small network with two heads, and an average of its weights."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = m.body(x)
        return m.head(h), m.other(h)

    first = nn.Sequential(nn.Linear(WIDTH, 300), nn.GELU(), nn.LayerNorm(300))
    body = nn.Sequential(*first, nn.Linear(300, 300), nn.ReLU())
    heads = {"head": nn.Linear(300, 10), "other": nn.Linear(300, 30)}
    return Composed(forward, body=body, **heads, average=copy.deepcopy(body).requires_grad_(False))


def two_networks() -> nn.Module:
    """Generator and discriminator in one module, which is never called itself."""
    generator = nn.Sequential(nn.Linear(16, 200), nn.GELU(), nn.Linear(200, WIDTH))
    hidden = nn.Linear(WIDTH, 400), nn.GELU(), nn.Linear(400, 300), nn.ReLU()
    return Composed(generator=generator, critic=nn.Sequential(*hidden, nn.Linear(300, 1)))


def batch(n: int) -> Tensor:
    return torch.randn(n, WIDTH)


def loss(model: nn.Module, x: Tensor) -> Any:
    first, second = model(x)
    return F.cross_entropy(first, x[:, 0].long().abs()) + second.square().mean()


def simple(model: nn.Module, x: Tensor, optimizer: Optimizer, set_to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none)
    loss(model, x).backward()
    optimizer.step()


def accumulated(model: nn.Module, x: Tensor, optimizer: Optimizer) -> str:
    for part in x.chunk(4):
        (loss(model, part) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
    return "whatever"


def two_losses(model: nn.Module, x: Tensor, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    first, second = model(x)
    F.cross_entropy(first, x[:, 0].long().abs()).backward(retain_graph=True)
    (2 * second.square().mean()).backward()
    optimizer.step()


def gan(model: Any, x: Tensor, optimizer: Optimizer) -> None:
    fake = model.generator(torch.randn(len(x), 16, device=x.device))
    optimizer.zero_grad()
    real_loss = F.softplus(-model.critic(x)).mean()
    (real_loss + F.softplus(model.critic(fake.detach())).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.critic.requires_grad_(False)
    F.softplus(-model.critic(fake)).mean().backward()
    model.critic.requires_grad_(True)
    optimizer.step()


def clipped_and_averaged(model: Any, x: Tensor, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    loss(model, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    with torch.no_grad():
        for mean, parameter in zip(model.average.parameters(), model.body.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)


STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[..., object]]] = {
    "simple": (net, simple),
    "zeros": (net, partial(simple, set_to_none=False)),
    "four micro-batches": (net, accumulated),
    "two losses": (net, two_losses),
    "GAN": (two_networks, gan),
    "clipped, averaged": (net, clipped_and_averaged),
}


def of_step(name: str) -> mt.Workload:
    model, step = STEPS[name]
    return mt.Workload(model, batch, step=step, batch_size=BATCH)


@cache
def profiled(name: str) -> mt.Profile:
    """The profile of `of_step(name)` for several tests; of the simple one with all its variants."""
    with nullcontext() if name == "simple" else without_variants():
        return mt.profile(of_step(name), options=OPTIONS, seeds=2)


def mixed(profile: mt.Profile) -> mt.Policy:
    """One setting after the other."""
    choices = cycle([mt.LayerSettings(level=level) for level in (16, 4, 256)] + [EXACT])
    layers = profile.layers
    return mt.Policy.from_assignments((each.tag, each.index, each.name, next(choices)) for each in layers)


@pytest.mark.parametrize("name", swept(STEPS, {*STEPS} - {"GAN", "simple"}))
def test_bytes_are_predicted(name: str) -> None:
    work, profile = of_step(name), profiled(name)
    for policy in (PLAIN, FOUR_BITS, mixed(profile)):
        found, predicted = second_step(work, policy), profile.predict(policy)
        assert predicted.saved_bytes == found.saved_bytes
        # The measurement also holds a loss. Of mixed settings, the time of a death may be a guess.
        share = 0.001 if policy in (PLAIN, FOUR_BITS) else 0.01
        assert -16 <= predicted.peak_bytes - found.peak_bytes <= share * found.peak_bytes
    larger = second_step(work.with_batch_size(200), FOUR_BITS)
    at_200 = profile.predict(FOUR_BITS, batch_size=200)
    assert abs(at_200.saved_bytes - larger.saved_bytes) <= 16
    assert abs(at_200.peak_bytes - larger.peak_bytes) <= 0.001 * larger.peak_bytes
    assert sum(layer.own_bytes for layer in profile.layers) == profile.saved_bytes
    assert all(layer.bytes >= layer.own_bytes for layer in profile.layers)


@pytest.mark.parametrize("name", ["simple", "zeros"])
def test_a_step_that_does_what_the_default_does_has_its_profile(name: str) -> None:
    default = mt.Workload(net, batch, loss, batch_size=BATCH, set_to_none=name != "zeros")
    with nullcontext() if name == "simple" else without_variants():
        ours, theirs = profiled(name), mt.profile(default, options=OPTIONS, seeds=2)
    for field in ("static_bytes", "saved_bytes", "peak_bytes", "ties", "exact", "error_floor"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert [replace(each, id=0) for each in ours.tensors] == [replace(each, id=0) for each in theirs.tensors]
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        assert (layer.name, layer.bytes, layer.own_bytes) == (other.name, other.bytes, other.own_bytes)
        assert [option.ratios for option in layer.options] == [option.ratios for option in other.options]
    for policy in (PLAIN, FOUR_BITS):
        mine, given = ours.predict(policy), theirs.predict(policy)
        assert (mine.saved_bytes, mine.gradient_error) == (given.saved_bytes, given.gradient_error)
        assert abs(mine.peak_bytes - given.peak_bytes) <= 16  # when the loss dies


@pytest.mark.parametrize("name", swept(STEPS, {"clipped, averaged"}))
def test_errors_are_predicted(name: str) -> None:
    work, policy = of_step(name), mt.Policy.uniform(level=4)
    error = mean_error(JointError(work), policy, [(draw, 9) for draw in range(4)])
    assert 0.5 < error / known(profiled(name).predict(policy).gradient_error) < 2


def test_the_gradient_is_what_all_backwards_add_before_it_is_clipped() -> None:
    once = gradient("simple")
    assert torch.equal(once, gradient("clipped, averaged"))
    torch.testing.assert_close(gradient("four micro-batches"), once)
    work, model = of_step("GAN"), of_step("GAN").build()
    x, total = work.make_batch(), [torch.zeros_like(parameter) for parameter in model.parameters()]
    with seeded(mixed_seed(work.seed, -1), "cpu"):
        gan(model, x, _Summing(model, total))
    torch.testing.assert_close(gradient("GAN"), torch.cat([part.flatten() for part in total]))


class _Summing(torch.optim.SGD):
    """Adds up the gradients that it receives, and changes nothing."""

    def __init__(self, model: nn.Module, total: list[Tensor]) -> None:
        super().__init__(model.parameters(), lr=1.0)
        self.total = total

    def step(self, closure: Any = None) -> Any:
        for part, parameter in zip(self.total, self.param_groups[0]["params"], strict=True):
            if parameter.grad is not None:
                part.add_(parameter.grad)


def gradient(name: str) -> Tensor:
    found = JointError(of_step(name)).exact_at(0)[1]
    return torch.cat([part.flatten() for part in found if part is not None])


@pytest.mark.parametrize("name", ["GAN", "clipped, averaged"])
def test_measuring_errors_changes_nothing(name: str) -> None:
    joint = JointError(of_step(name))
    assert all(parameter.grad is None for parameter in joint.model.parameters())
    with no_trace(joint.model):
        assert joint.errors(FOUR_BITS, [(0, 0)]) == joint.errors(FOUR_BITS, [(0, 0)])
        assert joint.noise(most=2).relative > 0


@pytest.mark.slow("training")
@pytest.mark.parametrize("name", ["four micro-batches", "GAN"])
def test_a_policy_is_found_and_verified(name: str) -> None:
    work, profile = of_step(name), profiled(name)
    limits: dict[str, Any] = {"budget": profile.peak_bytes, "max_saved": profile.saved_bytes // 2}
    plan = mt.search_policy(profile, **limits, workload=work, trials=3)
    check = mt.verify(work, plan.policy, predicted=plan.predicted, steps=1, seeds=2)
    assert check.policy.saved_bytes == plan.predicted.saved_bytes <= profile.saved_bytes // 2
    assert check.baseline.saved_bytes == profile.saved_bytes
    assert 0.2 < known(check.gradient_error) / known(plan.predicted.gradient_error) < 5


def test_bytes_without_memory_are_those_of_the_step() -> None:
    for name in ("four micro-batches", "GAN"):
        real, fake = profiled(name), mt.estimate(of_step(name), FOUR_BITS)
        assert fake.saved_bytes == real.predict(FOUR_BITS).saved_bytes
        assert fake.peak_bytes == pytest.approx(real.predict(FOUR_BITS).peak_bytes, rel=0.001)


def by_closure(model: nn.Module, x: Tensor, optimizer: Optimizer) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        value = loss(model, x)
        value.backward()
        return value.item()

    optimizer.step(closure)


def test_an_optimizer_may_call_the_step() -> None:
    work = mt.Workload(net, batch, step=by_closure, optimizer=torch.optim.LBFGS, batch_size=BATCH)
    model = work.build()
    before = model.get_parameter("head.weight").detach().clone()
    work.take_step(model, work.make_batch(), work.make_optimizer(model))
    assert not torch.equal(model.get_parameter("head.weight"), before)
    joint = JointError(work)
    assert 0 < joint.errors(FOUR_BITS, [(0, 0)])[0].error < 0.1
    assert torch.equal(joint.model.get_parameter("head.weight"), before)


MODEL = """
import torch
from torch import nn
def model(): return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
def batch(n): return torch.randn(n, 8)
BATCH_SIZE = 16
"""
STEP = """
def step(model, x, optimizer):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
IN_CONTEXT = STEP.replace("    model(x)", "    with torch.device('cpu'): model(x)")
BAD = {
    "no function": ("step = 3", "step is a int, not a function"),
    "no backward": (STEP.replace(".backward()", ""), r"model.py:7: step\(\) called no backward\(\)"),
    "no update": (
        STEP.replace("    optimizer.step()", ""),
        r"model.py:7: step\(\) did not call optimizer.step",
    ),
    "raises": (STEP.replace("model(x)", "model(x) + {}[1]"), r"model.py:9: step\(\) raised KeyError: 1"),
    "and accumulation": (STEP + "ACCUMULATION = 2\n", r"both step\(\) and ACCUMULATION"),
    "and autocast": (STEP + "AUTOCAST = 'bfloat16'\n", r"both step\(\) and AUTOCAST"),
    "in a context": (IN_CONTEXT, r"calls backward\(\) or optimizer"),
    "some gradients": (STEP.replace("ward()", "ward(inputs=[*model.parameters()])"), r"backward\(inputs=…\)"),
    "neither": ("", r"no function loss\(model, batch\): loss is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_steps_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, message = BAD[name]
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL.lstrip() + text)
    with pytest.raises(mt.WorkloadError, match=message) as caught:
        mt.profile(mt.Workload.load("model.py", device="cpu"), options=OPTIONS, seeds=1)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("page", ["docs/concepts.md", "mesa_tune/templates/model.py"])
def test_the_steps_of_the_documentation_run(page: str, tmp_path: Path) -> None:
    text = (Path(mt.__file__).parents[1] / page).read_text("utf-8")
    template = page.endswith(".py")
    body = text.partition("def step(")[2].partition("\n\n" if template else "```")[0]
    path = tmp_path / "model.py"
    path.write_text((text if template else MODEL) + "\ndef step(" + body.replace("\n# ", "\n"))
    work = mt.Workload.load(path, device="cpu", batch_size=16)
    model = work.build()
    before = copy.deepcopy(model.state_dict())
    work.take_step(model, work.make_batch(), work.make_optimizer(model))
    assert all(not torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_model_file_with_a_step_needs_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL + STEP)
    assert mt.profile(mt.Workload.load(path, device="cpu"), options=[]).saved_bytes > 0
    with pytest.raises(mt.WorkloadError, match="neither loss nor step"):
        mt.Workload(net, batch, batch_size=8)
