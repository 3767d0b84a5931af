"""`mesa-tune profile -- python train.py`: unmodified scripts, by the real command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mesa_tune as mt
from mesa_tune import cli

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

MODEL = """
import torch
from transformers import BertConfig, BertForSequenceClassification as Bert

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}

def model(): return Bert(BertConfig(vocab_size=50, max_position_embeddings=32, **SIZES))
def batch(n):
    x = torch.randint(50, (n, 16))
    return {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": torch.randint(2, (n,))}
def loss(model, batch): return model(**batch).loss
BATCH_SIZE = 8
"""

START = """
import sys, torch
from model import batch, model
torch.manual_seed(0)
net = model()
"""
END = """
print("done", sum(p.double().sum() for p in net.parameters()).item().hex(), torch.rand(1).item().hex())
"""

SCRIPTS = {
    "loop": """
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    given = batch(8)
    loss = net(**given).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "Trainer": """
from transformers import Trainer, TrainingArguments
data = [{name: tensor[0] for name, tensor in batch(1).items()} for _ in range(32)]
options = {"per_device_train_batch_size": 8, "max_steps": 4, "use_cpu": True, "report_to": []}
arguments = TrainingArguments(output_dir="out", save_strategy="no", disable_tqdm=True, **options)
Trainer(net, arguments, train_dataset=data).train()
""",
    "Lightning": """
import lightning
class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, _): return self.net(**batch).loss
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())
data = [{name: tensor[0] for name, tensor in batch(1).items()} for _ in range(32)]
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **options)
trainer.fit(Lit(), torch.utils.data.DataLoader(data, batch_size=8))
""",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def last_line(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("done"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unmodified_script(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text(START + SCRIPTS[name] + END)
    plain = subprocess.run([sys.executable, "train.py"], check=True, capture_output=True, text=True)
    assert cli.run(["profile", "--", sys.executable, "train.py"]) == 0
    output = capfd.readouterr().out
    assert last_line(output) == last_line(plain.stdout)  # losses, weights and random numbers, bit for bit
    assert "saved activations" in output
    found = mt.Profile.load("mesa-run/profile.json")
    expected = mt.profile(mt.Workload.load("model.py", device="cpu"), options=[])
    names = [(layer.name, layer.tag, layer.index, layer.own_bytes) for layer in expected.layers]
    assert [(layer.name, layer.tag, layer.index, layer.own_bytes) for layer in found.layers] == names
    assert found.saved_bytes == expected.saved_bytes
    assert cli.run(["search", "--budget", "60%"]) == 1
    assert "no prices of policies" in capfd.readouterr().err


def test_stop_ends_the_script(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    endless = SCRIPTS["loop"].replace("range(4)", "iter(int, 1)")
    (folder / "train.py").write_text(START + endless + END)
    assert cli.run(["profile", "--stop", "--", sys.executable, "train.py"]) == 0
    assert "wrote mesa-run/profile.json" in capfd.readouterr().out


def test_the_users_sitecustomize_still_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "site"), os.environ["PYTHONPATH"]]))
    code = "import sys; print(customized, 'mesa-tune-' in ''.join(sys.path), sys.modules['sitecustomize'])"
    assert cli.run(["profile", "--", sys.executable, "-c", code]) == 1
    captured = capfd.readouterr()
    assert captured.out.startswith(f"True False <module 'sitecustomize' from '{folder}")
    assert captured.err.startswith("error: no step was observed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "no-such-program", "train.py"], "no-such-program: cannot be run"),
        (["--", sys.executable, "-c", "raise SystemExit(3)"], "ended with status 3"),
        (["--steps", "1", "--", sys.executable, "-c", ""], "must be 2 or more"),
        (["--fast", "--", sys.executable, "-c", ""], "--fast: not for this profile"),
        (["--stop", "model.py"], "--stop: not for this profile"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_run_is_told(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["profile", *arguments]) == 1
    error = capfd.readouterr().err
    assert said in error
    assert len(error.splitlines()) <= 3
