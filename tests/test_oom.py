"""`mt.explain_oom`: what the step takes and what would fit, when memory has run out."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.rnn import pack_sequence

import mesa_tune as mt
from mesa_tune import cli
from mesa_tune.conversion.python_state.hooks import has_foreign_hooks
from mesa_tune.estimation import oom
from mesa_tune.integrations import compression
from mesa_tune.measure.memory.meter import measure_step
from tests.builders import Capture, Patch, gpt2, words
from tests.commands.scripts import ROOT


@pytest.fixture(name="calls", autouse=True)
def _calls(monkeypatch: Patch) -> oom._Calls:
    """`explain_oom()` was called."""
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    monkeypatch.setattr(oom, "free_memory", lambda _: (45 * 10**6, "in this test"))
    mt.explain_oom()
    return oom._installed[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = self.b(F.gelu(self.a(x) * scale))
        return y


class Failing(torch.autograd.Function):
    """Runs out of memory in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def failure(step: Any) -> None:
    """Let `step` fail, and the process end."""
    ends: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("atexit.register", ends.append)
        try:
            step()
        except (RuntimeError, MemoryError) as error:
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            raise AssertionError("did not fail")
    for end in ends:
        end()


def test_a_step_is_explained_by_its_own_bytes(capsys: Capture) -> None:
    model, batch = Net(), torch.randn(8192, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    out_of_memory: Any = Failing.apply
    failure(lambda: out_of_memory(model(batch, scale=2.0)).sum().backward())
    text = capsys.readouterr().err
    peak = measure_step(model, batch, lambda model, x: (model(x, 2.0) - 1).square().mean(), optimizer)
    expected = mt.estimate(
        model, batch, lambda model, x: (model(x, 2.0) - 1).square().mean(), optimizer=optimizer
    )
    assert expected.peak_bytes == pytest.approx(peak.peak_bytes, rel=0.01)
    lines = " ".join(text.split())
    assert "memory ran out in the backward. At batch size 8192 a plain step needs" in lines
    assert expected.at_peak.text.split(",")[0] in lines
    assert "Counted: AdamW with its state, and as the loss a mean square of what the model returns." in lines
    for layer, tag in (("gelu.0", "gelu"), ("b", "fc")):
        assert any(line.split()[:2] == [layer, tag] for line in text.splitlines())
    assert "mt.convert(model, mt.Policy.uniform(level=16))" in text
    assert ("MALLOC_MMAP_THRESHOLD_=65536" in text) == ("MALLOC_MMAP_THRESHOLD_" not in os.environ)
    assert "mesa-tune profile --stop -- python train.py --epochs 3\n" in text
    assert re.search(r"mesa-tune search --budget \d+MB --batch-size 8192\n", text)
    assert max(map(len, text.splitlines())) <= 80


def test_the_loss_of_the_model_counts(capsys: Capture) -> None:
    model, batch = gpt2(32, 1), words(8)

    def step() -> None:
        model(**batch).loss.backward()
        raise MemoryError

    failure(step)
    text = " ".join(capsys.readouterr().err.split())
    assert "Counted: no optimizer, as none was found, and the loss that the model returns." in text


class Full(nn.Module):
    """A layer or an optimizer that runs out of memory once."""

    failed = False

    def fail(self) -> None:
        failed, self.failed = self.failed, True
        if not failed:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def forward(self, x: Tensor) -> Tensor:
        self.fail()
        return x


def test_the_layer_of_a_forward_is_named(capsys: Capture) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(Full()))
    failure(lambda: model(torch.randn(8, 64)))
    assert "memory ran out in the forward of 1.0. " in " ".join(capsys.readouterr().err.split())


class FullOptimizer(torch.optim.SGD):
    room = Full()

    def step(self, closure: Any = None) -> Any:
        self.room.fail()


def test_the_optimizer_is_named(capsys: Capture) -> None:
    model = Net()
    optimizer = FullOptimizer(model.parameters())

    def step() -> None:
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()

    failure(step)
    lines = " ".join(capsys.readouterr().err.split())
    assert "memory ran out in the optimizer's step. " in lines
    assert "By this count it fits: something else has taken memory." in lines


def test_nothing_but_model_and_optimizer_is_kept(calls: oom._Calls) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    activations = model(torch.randn(8, 64))
    kept = calls.explanation(None)
    alive = weakref.ref(activations)
    del activations
    assert kept is not None
    assert (kept.model, kept.optimizer) == (model, optimizer)
    assert alive() is None


def test_other_errors_and_steps_without_gradients_are_left_alone(calls: oom._Calls, capsys: Capture) -> None:
    model = Net()
    with pytest.raises(RuntimeError):
        model(torch.randn(8, 65))
    calls.known.clear()
    with torch.no_grad():
        model(torch.randn(8, 64))
    assert not calls.known
    error = MemoryError()
    sys.excepthook(MemoryError, error, None)
    sys.excepthook(ValueError, ValueError(), None)
    assert not capsys.readouterr().err


BATCHES = {"packed": pack_sequence([torch.randn(3, 8), torch.randn(2, 8)]), "an object": object()}


@pytest.mark.parametrize("name", BATCHES)
def test_a_call_is_never_disturbed(name: str) -> None:
    batch = BATCHES[name]

    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, given: Any) -> Any:
            return given

    assert Taking()(batch) is batch


def test_traces_are_those_of_the_model() -> None:
    torch.jit.trace(Net(), torch.randn(4, 64))


@pytest.mark.parametrize("explain", [True, False])
def test_callbacks_explain_unless_told_not_to(explain: bool, monkeypatch: Patch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(compression, "explain_oom", lambda: called.append(True))
    started = compression.Compression(mt.Policy.uniform(level=16), explain=explain)
    started.start(compression.Training(Net(), None, list, None))
    started.stop()
    assert called == [True] * explain


def test_our_hook_is_no_foreign_one() -> None:
    assert not has_foreign_hooks([Net()])
    handle = register_module_forward_pre_hook(lambda *_: None)
    assert has_foreign_hooks([Net()])
    handle.remove()


def test_only_sizes_are_remembered(calls: oom._Calls) -> None:
    model, batch = Net(), torch.randn(8, 64)
    model(batch)
    of_batch, of_model = weakref.ref(batch), weakref.ref(model)
    del batch, model
    gc.collect()
    assert of_batch() is None
    assert of_model() is None
    assert not calls.known


def test_what_cannot_be_traced_is_told_in_a_line(capsys: Capture) -> None:
    class Deciding(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x, scale if x.sum().item() > 0 else 2.0)

    model = Deciding()

    def step() -> None:
        model(torch.randn(8, 64))
        raise MemoryError

    failure(step)
    assert capsys.readouterr().err.startswith("mesa-tune: the step cannot be explained: ")


SCRIPT = """
import resource, sys
import torch
from torch import nn
from torch.nn import functional as F
import mesa_tune as mt
layers = [layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.GELU())]
model = nn.Sequential(*layers, nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters())
if "convert" in sys.argv: mt.convert(model, mt.Policy.uniform(level=16))
status = open("/proc/self/status").read()
used = 1024 * int(status.split("VmData:")[1].split()[0])
limit = used + int(sys.argv[1]) * 10**6
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for _ in range(3):
    x = torch.randn(8192, 1024)
    loss = F.cross_entropy(model(x), torch.randint(10, (8192,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained")
"""


def trains(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `SCRIPT` by `mesa-tune run`, as its explanation says."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mesa_tune", "run", "--", sys.executable, "train.py", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow("processes")
def test_a_limit_of_the_process_counts_as_memory() -> None:
    limited = (
        "import resource; from mesa_tune.free_memory import free_memory, _status\n"
        "used = 1024 * int(_status().split('VmData:')[1].split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (used + 5 * 10**8,) * 2)\n"
        "print(*free_memory('cpu'), sep=':')"
    )
    command = [sys.executable, "-c", limited]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    left, _, what = said.strip().partition(":")
    assert 4.5e8 < int(left) <= 5e8
    assert what == "left by the process's limit"


@pytest.mark.slow("processes")
@pytest.mark.parametrize(("megabytes", "where"), [("300", "the forward of "), ("880", "the backward")])
def test_a_script_that_runs_out_of_memory_is_explained(megabytes: str, where: str, tmp_path: Path) -> None:
    failed = trains(tmp_path, megabytes)
    assert failed.returncode == 1
    assert "allocate memory" in failed.stderr
    assert f"mesa-tune: memory ran out in {where}" in failed.stderr


@pytest.mark.slow("processes")
def test_the_first_remedy_trains_under_the_same_limit(tmp_path: Path) -> None:
    failed = trains(tmp_path, "700")
    assert "4 bits everywhere" in failed.stderr
    assert "trained" in trains(tmp_path, "700", "convert").stdout


def test_the_status_of_a_script_is_that_of_run(capfd: Capture) -> None:
    assert cli.run(["run", "--", "sh", "-c", "exit 3"]) == 3
    assert cli.run(["run", "--", "no-such-program"]) == 1
    assert "no-such-program: cannot be run" in capfd.readouterr().err
