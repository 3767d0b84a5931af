"""`mesa-tune profile -- python train.py`: unmodified scripts, in this process and by real child processes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import mesa_tune as mt
from mesa_tune import cli
from mesa_tune.commands import profile as profiling
from mesa_tune.commands import script as running
from mesa_tune.measure.watching import bootstrap
from tests.builders import Capture, Patch
from tests.commands.scripts import (
    BERT,
    END,
    MODEL,
    ROOT,
    SCRIPTS,
    START,
    InThisProcess,
    last_lines,
    plain_profile,
    rows,
    run_plainly,
)

SELF = [sys.executable, "train.py"]
SHARED = '"${PYTHONPATH%%:*}"'
"""The folder that a command shares with its script, in a shell."""
FAULT = f"printf 'why not\\nwhat to do' > {SHARED}/fault.txt\n"
in_child = pytest.mark.slow("processes")


@pytest.fixture(name="folder", autouse=True)
def _folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The current folder, with a model file."""
    monkeypatch.chdir(tmp_path)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


@pytest.fixture(name="measured", autouse=True)
def _measured(monkeypatch: Patch) -> list[mt.Workload]:
    """The workloads whose prices would be measured."""
    measured: list[mt.Workload] = []
    monkeypatch.setattr(profiling, "_measure", lambda workload, **_: measured.append(workload))
    return measured


@pytest.fixture(name="here")
def _here(monkeypatch: Patch) -> None:
    """Python scripts run in this process."""
    monkeypatch.setattr("subprocess.Popen", InThisProcess)


here = pytest.mark.usefixtures("here")


@pytest.fixture(name="soon")
def _soon(monkeypatch: Patch) -> None:
    """A script that cannot be observed has little time to end by itself."""
    monkeypatch.setattr(running, "_SOON_S", 0.1)


@pytest.fixture(scope="module", name="expected")
def _expected(tmp_path_factory: pytest.TempPathFactory) -> mt.Profile:
    """The profile of `MODEL`."""
    return plain_profile(tmp_path_factory.mktemp("expected") / "model.py")


def assert_observed(expected: mt.Profile) -> None:
    """The profile of the run has the layers and the bytes of `expected`."""
    found = mt.Profile.load("mesa-run/profile.json")
    assert rows(found) == rows(expected)
    assert found.saved_bytes == expected.saved_bytes


@here
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unmodified_script(
    name: str, folder: Path, expected: mt.Profile, measured: list[mt.Workload], capfd: Capture
) -> None:
    (folder / "train.py").write_text(START + SCRIPTS[name] + END)
    run_plainly()
    assert cli.run(["profile", "--", *SELF]) == 0
    output = capfd.readouterr().out
    plain, observed = last_lines(output)
    assert observed == plain  # losses, weights and random numbers, bit for bit
    assert "saved activations" in output
    assert_observed(expected)
    (recorded,) = measured
    assert rows(mt.profile(recorded, options=[])) == rows(expected)


@in_child
def test_a_script_gets_prices_when_it_has_ended(folder: Path, monkeypatch: Patch, capfd: Capture) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (folder / "scripts").mkdir()
    (folder / "model.py").rename(folder / "scripts" / "model.py")
    (folder / "scripts" / "train.py").write_text(START + SCRIPTS["loop"].replace("range(4)", "range(20)"))
    command = ["profile", "--fast", "--", sys.executable, "scripts/train.py"]
    assert cli.run(command) == 0
    output = capfd.readouterr().out
    assert "prices of policies follow when the script has ended" in output
    assert "next: mesa-tune search --budget" in output
    assert mt.Profile.load("mesa-run/profile.json").own_noise is not None
    assert cli.run(["search", "--budget", "90%", "--trials", "0"]) == 0
    assert cli.run(command) == 0  # measures it anew


@in_child
def test_a_child_process_is_observed(folder: Path, capfd: Capture) -> None:
    (folder / "model.py").write_text(BERT)
    (folder / "train.py").write_text(START + SCRIPTS["Trainer"] + END)
    assert cli.run(["profile", "--", *SELF]) == 0
    subprocess.run(SELF, check=True)
    observed, plain = last_lines(capfd.readouterr().out)
    assert observed == plain
    assert_observed(mt.profile(mt.Workload.load("model.py", device="cpu"), options=[]))


@in_child
def test_a_child_process_is_stopped(folder: Path, capfd: Capture) -> None:
    endless = SCRIPTS["loop"].replace("range(4)", "iter(int, 1)")
    (folder / "train.py").write_text(START + endless + END)
    assert cli.run(["profile", "--stop", "--", *SELF]) == 0
    assert "wrote mesa-run/profile.json" in capfd.readouterr().out


def test_stop_ends_the_script(folder: Path, expected: mt.Profile, capfd: Capture) -> None:
    expected.save(folder / "made.json")
    script = f"cp made.json {SHARED}/profile.json; echo why > {SHARED}/unrecorded.txt; exec sleep 1000"
    assert cli.run(["profile", "--stop", "--", "sh", "-c", script]) == 0
    assert "wrote mesa-run/profile.json" in capfd.readouterr().out


@in_child
def test_the_users_sitecustomize_still_runs(folder: Path, monkeypatch: Patch, capfd: Capture) -> None:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "site"), os.environ["PYTHONPATH"]]))
    code = "import sys; print(customized, 'mesa-tune-' in ''.join(sys.path), sys.modules['sitecustomize'])"
    assert cli.run(["profile", "--", sys.executable, "-c", code]) == 1
    captured = capfd.readouterr()
    assert captured.out.startswith(f"True False <module 'sitecustomize' from '{folder}")
    assert captured.err.startswith("error: no step was observed")


def test_a_hidden_sitecustomize_takes_the_place_of_ours(folder: Path, monkeypatch: Patch) -> None:
    ours, theirs = str(folder / "ours"), str(folder / "theirs")
    for path in (ours, theirs):
        Path(path).mkdir()
        Path(path, "sitecustomize.py").write_text("ran = True\n")
    monkeypatch.setattr(bootstrap, "FOLDER", Path(ours))
    monkeypatch.setattr(sys, "path", [ours, theirs])
    monkeypatch.setitem(sys.modules, "sitecustomize", ModuleType("sitecustomize"))
    bootstrap.run_hidden()
    assert sys.path == [theirs]
    assert sys.modules["sitecustomize"].__file__ == str(Path(theirs, "sitecustomize.py"))
    assert vars(sys.modules["sitecustomize"])["ran"]


def test_the_watcher_waits_for_torch(folder: Path, monkeypatch: Patch) -> None:
    for name in ("torch", "other"):
        (folder / f"{name}.py").write_text("ready = True\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    ready: list[bool] = []
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "meta_path", [bootstrap.AfterTorch(), *sys.meta_path])
    monkeypatch.setattr(
        bootstrap, "wait_for_forward", lambda: ready.append(vars(sys.modules["torch"])["ready"])
    )
    importlib.import_module("other")
    assert not ready
    importlib.reload(importlib.import_module("torch"))
    assert ready == [True]
    assert not any(isinstance(finder, bootstrap.AfterTorch) for finder in sys.meta_path)


@here
def test_a_python_without_mesa_tune_is_told(folder: Path, capfd: Capture) -> None:
    name = "'mesa_tune.measure.recording.starting'"
    hidden = f"kept, sys.modules[{name}] = sys.modules[{name}], None\nnet(**batch(8))\n"
    (folder / "train.py").write_text(f"{START}{hidden}sys.modules[{name}] = kept\n")
    assert cli.run(["profile", "--", *SELF]) == 1
    assert f"the script's Python ({sys.executable}) cannot import mesa_tune" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "no-such-program", "train.py"], "no-such-program: cannot be run"),
        (["--", "sh", "-c", "exit 3"], "ended with status 3 before a step was observed"),
        (["--", "sh", "-c", "exit 0"], "the script called no module with gradients"),
        (["--steps", "1", "--", "sh", "-c", "true"], "must be 2 or more"),
        (["--bytes-only", "--", "sh", "-c", "true"], "--bytes-only: not for this profile"),
        (["--stop", "model.py"], "--stop: not for this profile"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_run_is_told(arguments: list[str], said: str, capfd: Capture) -> None:
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
from tests.builders import Capture, Patch
from mesa_tune.integrations.transformers import MesaTuneCallback
class Scored(Net):
    def forward(self, x, labels): return {"loss": F.cross_entropy(super().forward(x), labels)}
net, data = Scored(), [{"x": torch.randn(16), "labels": torch.tensor(3)} for _ in range(32)]
options = {"max_steps": 4, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
arguments = TrainingArguments(output_dir="out", **options)
Trainer(net, arguments, train_dataset=data, callbacks=[MesaTuneCallback(policy)]).train()
""",
}


@here
@pytest.mark.parametrize("name", COMPRESSING)
def test_a_script_that_compresses_is_refused_and_trains_on(name: str, folder: Path, capfd: Capture) -> None:
    (folder / "train.py").write_text(NETS + COMPRESSING[name] + END)
    run_plainly()
    assert cli.run(["profile", "--run", "observed", "--", *SELF]) == 1
    captured = capfd.readouterr()
    plain, unobserved = last_lines(captured.out)
    assert unobserved == plain
    assert captured.err.splitlines()[-2:] == [
        "error: the script itself compresses with mesa-tune, and only plain steps are observed",
        "leave mt.convert, mt.compress_saved, mt.auto and callbacks out for this run",
    ]


@here
def test_two_models_have_the_names_of_their_classes(folder: Path, capfd: Capture) -> None:
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
    assert cli.run(["profile", "--", *SELF]) == 0
    output = capfd.readouterr().out
    assert "note: step 3 of the script: Generator, Discriminator, at batch size 32\n" in output
    assert "note: several optimizers step (Adam, Adam)" in output
    assert output.splitlines()[-2:] == [
        "no prices: the script has several optimizers",
        "next: mesa-tune init, and put this step into model.py",
    ]
    assert max(map(len, output.splitlines())) <= 80
    sizes = {layer.name: layer.own_bytes for layer in mt.Profile.load("mesa-run/profile.json").layers}
    hidden = 32 * 256 * 4
    assert sizes["Generator.gelu.0"] == hidden
    assert sizes["Discriminator.gelu.0"] == 2 * hidden  # it is called on true and on made samples


@here
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
def test_why_no_step_was_observed(script: str, said: str, folder: Path, capfd: Capture) -> None:
    (folder / "train.py").write_text(NETS + script)
    assert cli.run(["profile", "--", *SELF]) == 1
    error = capfd.readouterr().err
    assert said in error
    assert len(error[error.index("error: ") :].splitlines()) == 2
    assert (folder / "mesa-run" / "profile.json").exists() == script.startswith("train(4); raise")


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("name", ["profile", "init"])
def test_a_script_that_cannot_be_observed_does_not_run_on(name: str, folder: Path, capfd: Capture) -> None:
    (folder / "train.sh").write_text(FAULT + "exec sleep 1000\n")
    commands = {
        "profile": ["profile", "--stop", "--", "sh", "train.sh"],
        "init": ["init", "mine.py", "--from", "sh train.sh"],
    }
    assert cli.run(commands[name]) == 1
    assert capfd.readouterr().err == "error: why not\nwhat to do\n"


@pytest.mark.usefixtures("soon")
def test_it_is_said_at_once_that_no_step_will_be_observed(folder: Path, capfd: Capture) -> None:
    (folder / "train.sh").write_text(FAULT + "exec sleep 0.5\n")
    assert cli.run(["profile", "--", "sh", "train.sh"]) == 1
    first = "mesa-tune: why not; the script goes on, unobserved"
    assert capfd.readouterr().err.splitlines() == [first, "error: why not", "what to do"]


@in_child
@pytest.mark.usefixtures("soon")
def test_a_helper_of_the_script_that_ends_is_not_the_script(folder: Path, capfd: Capture) -> None:
    helper = "import torch; torch.nn.Linear(2, 2)(torch.ones(2))"
    started = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {helper!r}])"
    (folder / "train.py").write_text(NETS + started + "; time.sleep(1); train(4)")
    assert cli.run(["profile", "--stop", "--", *SELF]) == 0
    assert "note: step 3 of the script: Net, at batch size 32\n" in capfd.readouterr().out
