"""The command that `profile` names next succeeds, whatever fills the step; and so do those after it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mesa_tune import cli
from mesa_tune.measure import profiling
from tests.builders import Capture, Patch
from tests.synthetic import synthetic_profile

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
"""


def model_file(model: str, batch: str, loss: str, batch_size: int) -> str:
    """What a model file says of three expressions: `batch` of `n`, `loss` of `model` and `batch`."""
    return f"""
def model(): return {model}
def batch(n): return {batch}
def loss(model, batch): return {loss}
BATCH_SIZE = {batch_size}
"""


def classifier(model: str, inputs: str, batch_size: int = 32) -> str:
    """A model file of a classifier: `model` an expression, `inputs` of `n` samples."""
    batch = f"({inputs}, torch.randint(4, (n,)))"
    return model_file(model, batch, "F.cross_entropy(model(batch[0]), batch[1])", batch_size)


SAME = "F.mse_loss(model(batch), batch)"


def readme() -> str:
    """README's model, in a width that takes a second."""
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    code = re.search(r"A short one:\n\n```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    return code[1].replace("4096", "256").replace("BATCH_SIZE = 512", "BATCH_SIZE = 32")


LSTM = """
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])
""" + classifier("Recurrent()", "torch.randn(n, 20, 16)")

AUTOENCODER = model_file(
    "nn.Sequential(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)), "
    "nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))",
    "torch.randn(n, 64)", SAME, 256,
)  # fmt: skip

LORA = """
class Adapted(nn.Module):
    def __init__(self, inner, outer, rank=4):
        super().__init__()
        self.base = nn.Linear(inner, outer).requires_grad_(False)
        self.down, self.up = nn.Linear(inner, rank, bias=False), nn.Linear(rank, outer, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))
""" + classifier(
    "nn.Sequential(Adapted(64, 128), nn.GELU(), Adapted(128, 128), nn.GELU(), Adapted(128, 4))",
    "torch.randn(n, 64)",
    256,
)

GPT = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head(x + self.mlp(x))
""" + model_file(
    "Model()",
    "torch.randint(50, (n, 33))",
    "F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())",
    8,
)

UNET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x):
        first = F.relu(self.first(x))
        deep = F.relu(self.down(F.max_pool2d(first, 2)))
        return self.last(torch.cat([first, self.up(deep)], 1))
""" + model_file("Net()", "torch.randn(n, 1, 16, 16)", SAME, 16)

VAE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 256), nn.SiLU(), nn.Linear(256, 64))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        distance = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(-1).mean()
        return self.decoder(sample), distance

def evidence(batch, output, distance): return F.mse_loss(output, batch) + 0.1 * distance
""" + model_file("Net()", "torch.randn(n, 64)", "evidence(batch, *model(batch))", 256)

PAIRS = """
def model():
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.LayerNorm(128), nn.Linear(128, 32))

def batch(n):
    x = torch.randn(n, 64)
    return x, x + 0.1 * torch.randn(n, 64)

def loss(model, batch):
    first, second = (F.normalize(model(x), dim=-1) for x in batch)
    return F.cross_entropy(10 * first @ second.T, torch.arange(len(first)))

BATCH_SIZE = 128
"""

EXPERTS = """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)
        )

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            output = output.index_add(0, rows, weights[rows, None] * expert(x[rows]))
        return x + output
""" + classifier("nn.Sequential(nn.Linear(32, 32), Experts(), nn.Linear(32, 4))", "torch.randn(n, 32)", 512)

DEPTHWISE = classifier(
    "nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.Hardswish(), nn.Conv2d(16, 16, 3, groups=16), "
    "nn.BatchNorm2d(16), nn.Hardswish(), nn.Conv2d(16, 32, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), "
    "nn.Linear(32, 4))",
    "torch.randn(n, 3, 16, 16)",
)

MODELS = {
    "readme": readme(),
    "mlp": classifier(
        "nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))", "torch.randn(n, 64)", 512
    ),
    "cnn": classifier(
        "nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 4))",
        "torch.randn(n, 1, 16, 16)",
    ),
    "lstm": LSTM,
    "autoencoder": AUTOENCODER,
    "lora": LORA,
    "gpt": GPT,
    "unet": UNET,
    "gru": LSTM.replace("LSTM", "GRU"),
    "vae": VAE,
    "pairs": PAIRS,
    "experts": EXPERTS,
    "depthwise": DEPTHWISE,
    "encoder": classifier(
        "nn.Sequential(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), nn.Flatten(), "
        "nn.Linear(512, 4))",
        "torch.randn(n, 16, 32)",
    ),
    "embedding bag": classifier(
        "nn.Sequential(nn.EmbeddingBag(2000, 32), nn.Linear(32, 4))", "torch.randint(2000, (n, 20))"
    ),
    "optimizer": classifier(
        "nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))",
        "torch.randn(n, 256)",
        4,
    ),
    "one layer": classifier("nn.Linear(64, 4)", "torch.randn(n, 64)"),
    "frozen": classifier(
        "nn.Sequential(nn.Linear(64, 128).requires_grad_(False), nn.ReLU(), nn.Linear(128, 4))",
        "torch.randn(n, 64)",
    ),
    "one batch size": classifier("nn.Linear(64, 4)", "torch.randn(32, 64)[: n // n * 32]").replace(
        "(n,)", "(32,)"
    ),
}


SHORT = {
    "search": ["--trials", "0"],  # a study would take two minutes
    "verify": ["--steps", "1", "--seeds", "1"],
    "report": ["--format", "json"],  # figures take seconds
}
WHY = {
    "optimizer": "no activation lives in the optimizer's step from batch size 572 on, 4 bits everywhere save "
    "10% of it with `fused=True` the optimizer has no temporaries: 6.35 MB",
    "frozen": "no policy saves 5% of the peak: saved tensors are 0% of it",
    "lstm": "no policy saves 5% of the peak: saved tensors are 90% of it, and most stay exact",
}


def next_in(text: str) -> list[str]:
    """The arguments of the last command that is named as the next one."""
    named = re.findall(r"^next: mesa-tune ([^,\n]*)", text, re.MULTILINE)
    assert named, text
    return shlex.split(named[-1])


@pytest.fixture(autouse=True)
def _fresh_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_profiles(name: str, *options: str) -> None:
    Path("model.py").write_text(HEAD + MODELS[name])
    assert cli.run(["profile", "model.py", *options]) == 0


SHORT_WALKS = ("mlp", "lstm", "frozen", "optimizer", "one layer", "one batch size")
"""Models of all ways that a profile advises, and whose campaigns are short."""
OTHERS = [pytest.param(key, marks=pytest.mark.slow("training")) for key in MODELS if key not in SHORT_WALKS]


@pytest.mark.parametrize("name", [*SHORT_WALKS, *OTHERS])
def test_the_command_that_a_profile_names_next_succeeds(name: str, capsys: Capture) -> None:
    assert_profiles(name, "--fast")
    walked = []
    while "report" not in walked:
        command, *options = next_in(capsys.readouterr().out)
        assert cli.run([command, *options, *SHORT[command]]) == 0
        walked.append(command)
    assert walked in (["search", "verify", "report"], ["report"])


@pytest.mark.parametrize(("name", "why"), WHY.items())
def test_a_profile_says_why_no_policy_lowers_the_peak(name: str, why: str, capsys: Capture) -> None:
    assert_profiles(name, "--fast")
    assert why in " ".join(capsys.readouterr().out.split())


def test_a_timeout_ends_a_profile_that_a_search_can_use(monkeypatch: Patch, capsys: Capture) -> None:
    with monkeypatch.context() as slow:
        slow.setattr(profiling, "_TIMED_STEPS", 1e9)  # as if the steps to be timed took all of the time
        assert_profiles("mlp", "--timeout", "60")
    printed = capsys.readouterr().out
    assert "time was up: errors were measured on 1 batch" in printed
    command, *options = next_in(printed)
    assert cli.run([command, *options, *SHORT[command]]) == 0


def test_an_unreachable_budget_names_one_that_succeeds(capsys: Capture) -> None:
    assert_profiles("optimizer", "--fast", "--quiet")
    for budget, more in (("40%", []), ("100kB", ["--max-batch"])):
        command = ["search", *more, "--trials", "0", "--force"]
        assert cli.run([*command, "--budget", budget]) == 1
        error = capsys.readouterr().err
        assert len(error.splitlines()) <= 3
        reachable = re.findall(r"--budget ([\d.%]+)", error)[0]
        assert cli.run([*command, "--budget", reachable]) == 0


def test_an_unreachable_step_time_names_one_that_is_reachable(capsys: Capture) -> None:
    synthetic_profile().save("profile.json")
    command = ["search", "--budget", "80%", "--trials", "0", "--profile", "profile.json"]
    assert cli.run([*command, "--max-slowdown", "0.1"]) == 1
    reachable = re.findall(r"--max-slowdown ([\d.]+)", capsys.readouterr().err)[0]
    assert cli.run([*command, "--max-slowdown", reachable]) == 0
