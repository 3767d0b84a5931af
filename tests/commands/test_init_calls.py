"""`mesa-tune init --from` takes every kind of call of a loss: the file has its loss and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mesa_tune as mt
from mesa_tune import cli
from tests.builders import Patch
from tests.commands.scripts import InThisProcess

SCRIPT = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, MultivariateNormal, Normal
from torch.distributions import kl_divergence

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
weight = torch.rand(8)

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return 2 * x
    @staticmethod
    def backward(ctx, gradient): return 2 * gradient

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.MSELoss(), nn.SmoothL1Loss()
    def forward(self, out, y): return self.one(out, y) + self.other(out, y)

def loss_of(out, x, y):
{loss}

optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
for _ in range(4):
    x, y = torch.randn(6, 4), torch.randn(6, 8)
    loss = loss_of(net(x), x, y)
    optimizer.zero_grad()
    loss.backward()
    torch.save((loss.detach(), [parameter.grad for parameter in net.parameters()]), "expected.pt")
    optimizer.step()
"""

KINDS = {
    "power": "return ((out - y) ** 2).mean()",
    "reflected": "return ((2 ** -out) + 1 / (out.exp() + 1) + (1 - out) * (7 // (y.abs() + 1))).mean()",
    "matrix product": "return (out @ y.T).square().mean() + abs(-out).mean()",
    "comparisons": "return (out * (out > 0) * (y != 0) * ~(y == 2)).square().mean()",
    "bits of masks": "return out[((y > 0) & (y < 2)) | (y < -1) ^ (y > 3)].square().mean()",
    "operators in place": "z = out * 1; z += y; z *= 2; z **= 2; z -= 1; z /= 3; return z.mean()",
    "assigned slices": "z = out * 1; z[:, 0] = 0; z[y > 0] *= 2; z[0, 1:3] = y[0, 1:3]; return z.norm()",
    "views in place": "z = out * 1; z[:, 1].mul_(3); z.select(1, 2).copy_(y[:, 2]); return (z * z).mean()",
    "a buffer that is filled": "z = torch.zeros(6); z[:2] = out[:2].sum(1); z += 1; return (z * z).mean()",
    "a sum that begins with zero": "z = torch.zeros(()); z += out.square().mean(); return z",
    "changed labels": "y[y > 1] = 0; return (out - y).square().mean()",
    "out=": "z = torch.empty(6, 8); torch.mul(y, 2, out=z); return (out - z).square().mean()",
    "inplace=": "return F.relu(out * 2, inplace=True).square().mean()",
    "properties": "return (out.T.mT.real.data + out).square().mean()",
    "log_prob": "return -Normal(out, 1.0).log_prob(y).mean()",
    "log_prob of classes": "return -Categorical(logits=out).log_prob(y.argmax(1)).mean()",
    "log_prob of several": "return -Independent(Normal(out, out.exp()), 1).log_prob(y).mean()",
    "log_prob of a mixture": (
        "mixture = MixtureSameFamily(Categorical(logits=out), Normal(out, 1.0)); "
        "return -mixture.log_prob(y[:, 0]).mean()"
    ),
    "divergence": "return kl_divergence(Normal(out, 1.0), Normal(0.0, 1.0)).mean()",
    "namespaces": "return torch.special.erf(out).mean() + torch.linalg.norm(torch.fft.fft(out)).abs()",
    "einsum": "return torch.einsum('ij,kj->ik', out, y).square().mean()",
    "torch.ops": "return (torch.ops.aten.mul(out, out) + torch.ops.aten.add.Tensor(out, y)).square().mean()",
    "autograd function": "return Twice.apply(out).square().mean()",
    "autograd.grad": (
        "z = out.detach().requires_grad_(); (g,) = torch.autograd.grad((z ** 3).sum(), z); "
        "return (out - g).abs().mean()"
    ),
    "item": "return (out - y).square().sum() / (y > 0).sum().item()",
    "computed number": "return (out - y).square().sum() * (1 / float(y.abs().sum()))",
    "NumPy's numbers": "return (out * np.float32(2)).square().mean() * np.float64(0.5)",
    "complex number": "return (out * 2j).abs().mean()",
    "detach": "return (out / out.detach().norm()).mean() + out.norm()",
    "without gradients": "with torch.no_grad(): z = out.softmax(1)\n    return (z * out).mean()",
    "keywords": "return torch.sum(input=out ** 2, dim=0, keepdim=True).mean(dim=(0, 1))",
    "several results": "return sum(z.square().mean() for z in out.unbind(1)) + out.max(dim=1).values.mean()",
    "where": "return torch.where(y > 0, out, 0.0).square().mean()",
    "regularization": "return out.mean() + 1e-3 * sum(p.pow(2).sum() for p in net.parameters())",
    "loss module": "return nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)(out, y.argmax(1))",
    "nested loss module": "return Both()(out, y)",
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: Patch) -> None:
    """The current folder; Python scripts run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", InThisProcess)


def recorded(loss: str) -> int:
    """Exit status of `init --from` of a script with the statements `loss`."""
    Path("train.py").write_text(SCRIPT.format(loss=f"    {loss}"))
    return cli.run(["init", "mine.py", "--from", "train.py", "--quiet"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_call(kind: str) -> None:
    assert recorded(KINDS[kind]) == 0
    loss, gradients = torch.load("expected.pt")
    work = mt.Workload.load("mine.py", device="cpu")
    net = work.build()
    for _ in range(2):  # the loss leaves its batch as it is
        net.zero_grad()
        found = work.compute_loss(net, work.make_batch(draw=2))
        found.backward()
        torch.testing.assert_close(found.detach(), loss)
        torch.testing.assert_close([parameter.grad for parameter in net.parameters()], gradients)
    work.make_optimizer(net).step()


@pytest.mark.parametrize(
    "loss",
    [
        "return torch.func.vmap(lambda row: row.square().sum())(out).mean()",
        "out.register_hook(lambda gradient: 2 * gradient); return out.mean()",
        "return out.mean() if y.mean() > 0 else out.square().mean() * 2",
    ],
    ids=["inside vmap", "hook", "another loss each step"],
)
def test_what_no_source_describes_is_refused(loss: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert recorded(loss) == 1
    error = capfd.readouterr().err
    assert "error: the loss of the script" in error
    assert len(error.splitlines()) <= 3
