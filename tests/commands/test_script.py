"""`mesa-tune profile -- python train.py`: unmodified scripts, by the real command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import mesa_tune as mt
from mesa_tune import cli
from mesa_tune.commands import script as running

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
    (line,) = last_lines(text)
    return line


def last_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("done")]


def run_plainly(folder: Path, scripts: Mapping[str, str]) -> dict[str, str]:
    """Return the last line of each script; a process without `mesa-tune profile` runs one after the other."""
    (folder / "model.py").write_text(MODEL)
    for number, text in enumerate(scripts.values()):
        (folder / f"train{number}.py").write_text(text)
    code = (
        f"import runpy\nfor n in range({len(scripts)}): runpy.run_path(f'train{{n}}.py', run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    return dict(zip(scripts, last_lines(run.stdout), strict=True))


@pytest.fixture(scope="module", name="plain")
def _plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The last line of each of `SCRIPTS`."""
    scripts = {name: START + text + END for name, text in SCRIPTS.items()}
    return run_plainly(tmp_path_factory.mktemp("plain"), scripts)


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unmodified_script(
    name: str, folder: Path, plain: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(START + SCRIPTS[name] + END)
    assert cli.run(["profile", "--", sys.executable, "train.py"]) == 0
    output = capfd.readouterr().out
    assert last_line(output) == plain[name]  # losses, weights and random numbers, bit for bit
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
        (
            ["--", sys.executable, "-c", "raise SystemExit(3)"],
            "ended with status 3 before a step was observed",
        ),
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


NETS = """
import torch, mesa_tune as mt
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self, inputs=16, outputs=10):
        super().__init__()
        self.hidden, self.out = nn.Linear(inputs, 256), nn.Linear(256, outputs)
    def forward(self, x): return self.out(F.gelu(self.hidden(x)))
class Generator(Net): pass
class Discriminator(Net): pass
net, policy = Net(), mt.Policy.uniform(level=16)
optimizer = torch.optim.AdamW(net.parameters())
def batch(): return torch.randn(32, 16), torch.randint(10, (32,))
def loss(model, batch): return F.cross_entropy(model(batch[0]), batch[1])
def train(steps, loss=loss, before=lambda step: None):
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        loss(net, batch()).backward()
        optimizer.step()
"""

COMPRESSING = {
    "convert": "mt.convert(net, policy); train(5)",
    "of a part": "mt.convert(net.hidden, policy); train(5)",
    "in the third step": "train(5, before=lambda step: step == 2 and mt.convert(net, policy))",
    "auto": """
import tempfile
with tempfile.TemporaryDirectory() as run:
    mt.auto(net, batch(), loss, budget="10GB", optimizer=optimizer, run=run)
train(5)
""",
    "compress_saved": """
def compressed(model, batch):
    logits = model(batch[0])
    with mt.compress_saved(policy): return F.cross_entropy(logits, batch[1])
train(5, compressed)
""",
    "callback": """
from transformers import Trainer, TrainingArguments
from mesa_tune.integrations.transformers import MesaTuneCallback
class Scored(Net):
    def forward(self, x, labels): return {"loss": F.cross_entropy(super().forward(x), labels)}
net, data = Scored(), [{"x": torch.randn(16), "labels": torch.tensor(3)} for _ in range(32)]
options = {"max_steps": 4, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
arguments = TrainingArguments(output_dir="out", **options)
Trainer(net, arguments, train_dataset=data, callbacks=[MesaTuneCallback(policy)]).train()
""",
}


@pytest.fixture(scope="module", name="compressed")
def _compressed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The last line of each of `COMPRESSING`."""
    scripts = {name: NETS + text + END for name, text in COMPRESSING.items()}
    return run_plainly(tmp_path_factory.mktemp("compressed"), scripts)


@pytest.mark.parametrize("name", COMPRESSING)
def test_a_script_that_compresses_is_refused_and_trains_on(
    name: str, folder: Path, compressed: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(NETS + COMPRESSING[name] + END)
    assert cli.run(["profile", "--run", "observed", "--", sys.executable, "train.py"]) == 1
    captured = capfd.readouterr()
    assert last_line(captured.out) == compressed[name]
    assert captured.err.splitlines()[-2:] == [
        "error: the script itself compresses with mesa-tune, and only plain steps are observed",
        "leave mt.convert, mt.compress_saved, mt.auto and callbacks out for this run",
    ]


def test_two_models_have_the_names_of_their_classes(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gan = """
made, judge = Generator(8, 16), Discriminator(16, 1)
of_made, of_judge = torch.optim.Adam(made.parameters()), torch.optim.Adam(judge.parameters())
for _ in range(5):
    fake = made(torch.randn(32, 8))
    of_judge.zero_grad()
    (judge(fake.detach()) - judge(torch.randn(32, 16))).mean().backward()
    of_judge.step()
    of_made.zero_grad()
    judge(fake).mean().backward()
    of_made.step()
"""
    (folder / "train.py").write_text(NETS + gan)
    assert cli.run(["profile", "--", sys.executable, "train.py"]) == 0
    output = capfd.readouterr().out
    assert "note: step 3 of the script: Generator, Discriminator, at batch size 32\n" in output
    assert "note: several optimizers step (Adam, Adam)" in output
    assert output.endswith("next: mesa-tune init, and put one of these steps into model.py\n")
    assert max(map(len, output.splitlines())) <= 80
    sizes = {layer.name: layer.own_bytes for layer in mt.Profile.load("mesa-run/profile.json").layers}
    hidden = 32 * 256 * 4
    assert sizes["Generator.gelu.0"] == hidden
    assert sizes["Discriminator.gelu.0"] == 2 * hidden  # it is called on true and on made samples


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("train(4); raise ValueError", "ended with status 1\n"),
        ("train(1); raise ValueError", "ended with status 1 before a step was observed\n"),
        ("train(2)", "the script ended before it had taken 3 steps\nlet it run longer, or observe"),
        ("net(batch()[0])", "the script ran no backward(), so no step was observed\n"),
        ("loss(net, batch()).backward()", "no optimizer of torch.optim stepped in the script\n"),
        ("with torch.no_grad(): net(batch()[0])", "the script called no module with gradients"),
        ("net.compile(backend='eager'); train(4)", "set TORCH_COMPILE_DISABLE=1 if it compiles its model\n"),
    ],
)
def test_why_no_step_was_observed(
    script: str, said: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(NETS + script)
    assert cli.run(["profile", "--", sys.executable, "train.py"]) == 1
    error = capfd.readouterr().err
    assert said in error
    assert len(error[error.index("error: ") :].splitlines()) == 2
    assert (folder / "mesa-run" / "profile.json").exists() == script.startswith("train(4); raise")


@pytest.mark.parametrize("command", [["profile", "--stop", "--"], ["init", "mine.py", "--from"]])
def test_a_script_that_cannot_be_observed_does_not_run_on(
    command: list[str], folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_SOON_S", 0.1)
    endless = "import time; mt.convert(net, policy); train(10**9, before=lambda step: time.sleep(0.05))"
    (folder / "train.py").write_text(NETS + endless)
    assert cli.run([*command, *([sys.executable] if "--stop" in command else []), "train.py"]) == 1
    assert "the script itself compresses" in capfd.readouterr().err


def test_it_is_said_at_once_that_no_step_will_be_observed(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_SOON_S", 0.1)
    (folder / "train.py").write_text(NETS + "import time; mt.convert(net, policy); train(3); time.sleep(2)")
    assert cli.run(["profile", "--", sys.executable, "train.py"]) == 1
    first, *rest = capfd.readouterr().err.splitlines()
    assert first.startswith("mesa-tune: the script itself compresses with mesa-tune")
    assert first.endswith("; the script goes on, unobserved")
    assert [line.split(":")[0] for line in rest[:-1]] == ["error"]


def test_a_helper_of_the_script_that_ends_is_not_the_script(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_SOON_S", 0.1)
    helper = "import torch; torch.nn.Linear(2, 2)(torch.ones(2))"
    started = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {helper!r}])"
    (folder / "train.py").write_text(NETS + started + "; time.sleep(1); train(4)")
    assert cli.run(["profile", "--stop", "--", sys.executable, "train.py"]) == 0
    assert "note: step 3 of the script: Net, at batch size 32\n" in capfd.readouterr().out
