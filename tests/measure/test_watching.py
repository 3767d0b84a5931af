"""A script's own step, observed: it is the step of a profile of the same workload, and trains the same."""

from __future__ import annotations

import functools
import gc
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

import mesa_tune as mt
from mesa_tune.measure.memory.meter import Meter, bytes_of, gradients_of, tensors_in
from mesa_tune.measure.watching.watcher import Watcher
from tests.builders import ViT, cross_entropy, images, workload

Result = mt.Profile | str
Train = Callable[[nn.Module, torch.optim.Optimizer], None]


def vit() -> nn.Module:
    return ViT(depth=1)


class Checkpointed(ViT):
    """A ViT whose block runs again in backward."""

    def get_features(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position
        return self.norm(checkpoint(self.blocks[0], h, use_reentrant=False))  # type: ignore[no-any-return]


def simple(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    cross_entropy(model, images(8)).backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        (cross_entropy(model, images(8)) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def zeros_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    value = cross_entropy(model, images(8))
    optimizer.zero_grad()
    value.backward()
    optimizer.step()


def closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    given = images(8)

    def compute() -> float:
        optimizer.zero_grad()
        value = cross_entropy(model, given)
        value.backward()
        return value.item()

    optimizer.step(compute)


STEPS: dict[str, tuple[Train, dict[str, Any]]] = {
    "simple": (simple, {}),
    "accumulated": (accumulated, {"accumulation": 2}),
    "zeros between": (zeros_between, {}),
    "closure": (closure, {}),
}


def started(train: Train, make: Callable[[], nn.Module] = vit) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and its next step."""
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters())
    return net, functools.partial(train, net, optimizer)


@contextmanager
def watching(steps: int = 3) -> Iterator[list[Result]]:
    """Watch the body as the bootstrap does; yields where the result will be."""
    results: list[Result] = []
    watcher = Watcher("python train.py", steps, results.append)

    def begin(module: nn.Module, _: object) -> None:
        handle.remove()
        watcher.start(module)

    handle = register_module_forward_pre_hook(begin)
    yield results
    assert watcher.ended
    watcher.optimizer_hook.remove()


def observed(step: Callable[[], None], count: int = 4) -> Any:
    with watching() as results:
        for _ in range(count):
            step()
    assert len(results) == 1
    return results[0]


def rows(profile: mt.Profile) -> list[tuple[object, ...]]:
    columns = operator.attrgetter("name", "tag", "index", "shape", "dtype", "bytes", "own_bytes")
    return [columns(layer) for layer in profile.layers]


@functools.cache
def profile_of(accumulation: int) -> mt.Profile:
    return mt.profile(workload(vit, accumulation=accumulation), options=[])


@functools.cache
def observed_step(name: str) -> Any:
    return observed(started(STEPS[name][0])[1])


@pytest.mark.parametrize("name", STEPS)
def test_layers_and_bytes_are_those_of_a_profile(name: str) -> None:
    expected = profile_of(STEPS[name][1].get("accumulation", 1))
    found = observed_step(name)
    assert rows(found) == rows(expected)
    assert found.saved_bytes == expected.saved_bytes
    assert found.layers_fingerprint == expected.layers_fingerprint
    assert (found.batch_size, found.device) == (8, "cpu")


@pytest.mark.parametrize("name", STEPS)
def test_the_peak_is_that_of_the_same_step_unwatched(name: str) -> None:
    found = observed_step(name)
    net, step = started(STEPS[name][0])
    optimizer = step.args[1]  # type: ignore[attr-defined]
    with Meter() as meter:
        for _ in range(2):
            step()
        gc.collect()
        static = [*net.parameters(), *net.buffers(), *tensors_in(optimizer.state), *gradients_of(net)]
        older = bytes_of(static) - meter.counted_bytes(static)
        del static  # gradients that the step frees
        meter.reset_peak()
        step()
    # The batch of the step is born inside the meter, and before the forward in the script.
    peak = older + meter.tensor_peak
    others = bytes_of(list(images(8))) if name == "accumulated" else 0
    assert abs(found.peak_bytes - peak) <= 100 + others
    assert found.predict(mt.Policy.parse("")).peak_bytes == found.peak_bytes
    assert found.predict(mt.Policy.parse("")).saved_bytes == found.saved_bytes


@pytest.mark.parametrize("name", STEPS)
def test_training_is_the_same_bit_for_bit(name: str) -> None:
    train = STEPS[name][0]
    plain, step = started(train)
    for _ in range(4):
        step()
    state = torch.get_rng_state()
    watched, step = started(train)
    observed(step)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))
    assert all("forward" not in vars(module) for module in watched.modules())
    assert Tensor.backward.__module__ == torch.autograd.backward.__module__.replace(".autograd", "._tensor")


def test_a_checkpointed_model_is_observed() -> None:
    expected = mt.profile(workload(Checkpointed), options=[])
    found = observed(started(simple, Checkpointed)[1])
    assert rows(found) == rows(expected)
    assert found.saved_bytes == expected.saved_bytes


def test_variables_of_the_script_are_not_saved_for_backward() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        x, labels = images(8)
        output = model(x)
        doubled = torch.zeros(1000, 1000)  # noqa: F841 - lives until the step has ended
        F.cross_entropy(output, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    expected = observed_step("simple")
    found = observed(started(train)[1])
    assert found.saved_bytes == expected.saved_bytes
    assert found.peak_bytes > expected.peak_bytes + 3_900_000
    assert found.predict(mt.Policy.parse("")).saved_bytes == found.saved_bytes


def test_a_profile_of_a_script_has_no_prices(tmp_path: Any) -> None:
    observed_step("simple").save(tmp_path / "profile.json")
    loaded = mt.Profile.load(tmp_path / "profile.json")
    assert loaded.script == "python train.py"
    with pytest.raises(mt.RunError, match=r"no prices.*\n.*mesa-tune init"):
        loaded.predict(mt.Policy.uniform(level=16))
    with pytest.raises(mt.RunError, match=r"no prices.*\n.*mesa-tune init"):
        mt.search_policy(loaded, "60%", trials=0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: mt.convert(vit(), mt.Policy.uniform(level=16)), "leave mt.convert, "),
        (lambda: torch.compile(vit(), backend="eager"), "TORCH_COMPILE_DISABLE"),
    ],
    ids=["converted", "compiled"],
)
def test_what_cannot_be_observed_is_told_and_trains_on(make: Callable[[], nn.Module], said: str) -> None:
    net, step = started(simple, make)
    before = [parameter.clone() for parameter in net.parameters()]
    found = observed(step)
    assert said in str(found)
    assert isinstance(found, str)
    assert not all(map(torch.equal, before, net.parameters()))


def test_contexts_of_the_script_end_as_they_began() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.autograd.graph.save_on_cpu():
            value = cross_entropy(model, images(8))
        value.backward()
        optimizer.step()

    found = observed(started(train)[1])
    assert isinstance(found, str)
    assert "saved-tensor hooks" in found


def test_several_modules_have_the_names_that_their_owner_gives_them() -> None:
    def owner() -> nn.Module:
        return nn.ModuleDict({"encoder": nn.Linear(64, 128), "decoder": nn.Linear(128, 64)})

    def train(owner: Any, optimizer: torch.optim.Optimizer) -> None:
        x = torch.randn(256, 64)
        optimizer.zero_grad()
        (owner["decoder"](owner["encoder"](x).relu()) - x).square().mean().backward()
        optimizer.step()

    found = observed(started(train, owner)[1])
    assert {"encoder", "decoder"} & {layer.name for layer in found.layers} == {"decoder"}
    assert "loss.relu.0" in {layer.name for layer in found.layers}
