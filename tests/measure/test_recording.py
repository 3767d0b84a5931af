"""Recording the step of a script in this process: what is found, and what no model file can describe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import mesa_tune as mt
from mesa_tune.measure.recording.recorder import Recorder
from mesa_tune.measure.watching.watcher import Watcher

INNER = nn.Linear(4, 4)
SCALE = torch.ones(4, requires_grad=True)
Loss = Callable[[nn.Module, Tensor], Tensor]

BROKEN: dict[str, tuple[Loss, str]] = {
    "several calls": (lambda net, x: net(x) - net(x), "calls its model several times"),
    "several modules": (lambda net, x: INNER(net(x)), "must call one module, the trained model"),
    "trained inputs": (lambda net, x: net(x * SCALE), "an input of the script's model requires a gradient"),
    "trained tensors": (lambda net, x: net(x) * SCALE, "a trained tensor that is neither the model's"),
}


def recorded(folder: Path, step: Callable[[], None], steps: int) -> str:
    """Return what a recorder says of a script that takes one step more than `steps`."""
    faults: list[str] = []
    recorder = Recorder("train.py", steps, folder, folder / "model.py", faults.append)

    def begin(module: nn.Module, _: object) -> None:
        handle.remove()
        recorder.start(module)

    handle = register_module_forward_pre_hook(begin)
    for _ in range(steps + 1):
        step()
    assert recorder.ended
    assert isinstance(recorder, Watcher)
    recorder.optimizer_hook.remove()
    return faults[0]


def training(net: nn.Module, loss: Loss) -> Callable[[], None]:
    """Return a training step."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.scale(loss(net, torch.randn(6, 4)).square().mean()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)

    return step


@pytest.mark.parametrize("name", BROKEN)
def test_a_step_that_no_model_file_can_describe(name: str, tmp_path: Path) -> None:
    loss, said = BROKEN[name]
    fault = recorded(tmp_path, training(nn.Linear(4, 4), loss), 2)
    assert said in fault
    assert len(fault.splitlines()) <= 3
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_pickled(tmp_path: Path) -> None:
    net = nn.Linear(4, 4)
    net.register_forward_hook(lambda *_: None)
    assert "cannot be pickled" in recorded(tmp_path, training(net, lambda net, x: net(x)), 2)


def test_the_parts_of_a_step(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    targets = torch.randn(4)
    assert not recorded(tmp_path, training(net, lambda net, x: net(x) - targets + x.sum()), 3)
    work = mt.Workload.load(tmp_path / "model.py", device="cpu")
    assert (work.batch_size, work.scaler, work.clip_norm, work.set_to_none) == (6, True, 2.0, False)
    assert work.make_optimizer(work.build()).param_groups[0]["fused"]
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    torch.testing.assert_close(dict(work.build().state_dict()), expected)
    batch = work.make_batch(draw=2)
    output = net(*batch["args"])
    torch.testing.assert_close(
        work.compute_loss(net, batch), (output - targets + batch["args"][0].sum()).square().mean()
    )
    assert work.make_batch(4, draw=1)["args"][0].shape == (4, 4)
