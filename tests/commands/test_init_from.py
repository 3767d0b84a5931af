"""`mesa-tune init --from train.py`: the written file has the step of the script."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import mesa_tune as mt
from mesa_tune import cli
from mesa_tune.commands import profile as profiling
from tests.builders import Capture, Patch
from tests.commands.scripts import BERT, END, MODEL, ROOT, SCRIPTS, START, InThisProcess, plain_profile, rows

SELF = [sys.executable, "train.py"]

# Its own class, which uses a function, a constant and parsed arguments; flattened labels, class weights,
# micro-batches, autocast in the forward alone, clipping, a schedule.
OWN = """
from __future__ import annotations
import argparse
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32
parser = argparse.ArgumentParser()
parser.add_argument("--classes", type=int)
args = parser.parse_args()
x = lambda: None  # a name that the forward has, too

def double(x: Tensor) -> Tensor:
    return WIDTH * x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, args.classes)
    def forward(self, x):
        x = F.gelu(double(self.a(x)))
        return self.b(x).view(len(x), -1, args.classes)

if __name__ == "__main__":
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    criterion = nn.CrossEntropyLoss(weight=torch.rand(args.classes))
    for _ in range(4):
        for _ in range(2):
            images, labels = torch.randn(12, 16), torch.randint(args.classes, (12, 1))
            with torch.autocast("cpu", torch.bfloat16):
                logits = net(images)
            loss = criterion(logits.float().view(-1, args.classes), labels.view(-1))
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
"""


@pytest.fixture(name="folder", autouse=True)
def _folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The current folder; Python scripts run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", InThisProcess)
    monkeypatch.setattr(profiling, "_measure", lambda *_, **__: None)
    return tmp_path


def of_file(name: str) -> mt.Profile:
    """The profile of a model file."""
    assert cli.run(["profile", f"{name}.py", "--bytes-only", "--device", "cpu", "--run", name]) == 0
    return mt.Profile.load(f"{name}/profile.json")


@pytest.fixture(scope="module", name="expected")
def _expected(tmp_path_factory: pytest.TempPathFactory) -> mt.Profile:
    """The profile of `MODEL`, whose layers `profile -- python train.py` has, too: test_script.py."""
    return plain_profile(tmp_path_factory.mktemp("expected") / "model.py")


@pytest.mark.parametrize("name", ["loop", "Lightning"])
def test_the_file_has_the_layers_of_the_script(name: str, folder: Path, expected: mt.Profile) -> None:
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text(START + SCRIPTS[name] + END)
    assert cli.run(["init", "mine.py", "--from", "train.py", "--quiet"]) == 0
    assert rows(of_file("mine")) == rows(expected)


OTHERS = {
    "Accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
loader = torch.utils.data.DataLoader([0] * 48, batch_size=8, collate_fn=lambda given: batch(len(given)))
net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
for given in loader:
    with accelerator.accumulate(net):
        accelerator.backward(net(**given).loss)
        optimizer.step()
        optimizer.zero_grad()
""",
    "PEFT": """
from peft import LoraConfig, get_peft_model
net = get_peft_model(net, LoraConfig(target_modules=["query", "value"]))
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    with torch.autocast("cpu", torch.bfloat16): loss = net(**batch(8)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_observed_is_what_the_file_profiles(name: str, folder: Path) -> None:
    (folder / "model.py").write_text(MODEL)
    (folder / "train.py").write_text(START + OTHERS[name])
    assert cli.run(["profile", "--run", "script", "--", *SELF]) == 0
    assert cli.run(["init", "mine.py", "--from", "train.py"]) == 0
    observed, recorded = mt.Profile.load("script/profile.json"), of_file("mine")
    assert rows(observed) == rows(recorded)
    assert observed.saved_bytes == recorded.saved_bytes
    assert observed.peak_bytes == pytest.approx(recorded.peak_bytes, rel=0.01)
    assert observed.autocast == recorded.autocast == "bfloat16"


COMMAND = ["init", "mine.py", "--from", "train.py --classes 7"]


def assert_is_the_own_step(folder: Path, capfd: Capture) -> None:
    """`COMMAND` records `OWN`."""
    (folder / "train.py").write_text(OWN)
    assert cli.run(COMMAND) == 0
    assert capfd.readouterr().out.endswith("next: mesa-tune profile mine.py\n")
    work = mt.Workload.load("mine.py", device="cpu")
    assert (work.batch_size, work.autocast, work.accumulation, work.clip_norm) == (12, "bfloat16", 2, 1.0)
    options = work.make_optimizer(work.build()).param_groups[0]
    assert (options["lr"], options["momentum"]) == (0.1, 0.9)


def test_a_script_with_classes_of_its_own(folder: Path, capfd: Capture) -> None:
    assert_is_the_own_step(folder, capfd)
    assert cli.run(["profile", "--run", "script", "--", *SELF, "--classes", "7"]) == 0
    assert rows(of_file("mine")) == rows(mt.Profile.load("script/profile.json"))
    capfd.readouterr()
    assert cli.run(COMMAND) == 1
    assert "mine.py: exists already" in capfd.readouterr().err
    (folder / "mine-model.pt").write_bytes(b"")
    with pytest.raises(mt.WorkloadError, match="not those that were recorded"):
        mt.Workload.load("mine.py")


@pytest.mark.slow("processes")
def test_a_child_process_is_recorded(folder: Path, monkeypatch: Patch, capfd: Capture) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    assert_is_the_own_step(folder, capfd)
    (folder / "model.py").write_text(BERT)
    (folder / "train.py").write_text(START + SCRIPTS["Trainer"])
    assert cli.run(["init", "mine.py", "--from", "train.py", "--force"]) == 0
    assert rows(of_file("mine")) == rows(of_file("model"))


def test_a_loss_that_computes_with_the_batch_size(folder: Path, capfd: Capture) -> None:
    (folder / "train.py").write_text(
        "import torch\n"
        "net = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    net(torch.randn(6, 4)).view(12, 2).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    assert cli.run(["init", "--from", "train.py"]) == 1
    error = capfd.readouterr().err
    assert "model.py: was written, but loss() fails at batch size 3" in error
    assert len(error.splitlines()) == 3


def test_a_file_name_without_its_ending(capfd: Capture) -> None:
    assert cli.run(["init", "model", "--from", "train.py"]) == 1
    assert "that ends in .py" in capfd.readouterr().err
