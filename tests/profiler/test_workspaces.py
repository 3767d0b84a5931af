"""What kernels of the CPU take within one call, beside the growth of resident memory around real calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mesa_tune as mt
from mesa_tune.files import dump_json

MEASURE = """
import json, re, sys, torch
from pathlib import Path
from torch.utils._python_dispatch import TorchDispatchMode
from mesa_tune.profiler.memory.workspaces import workspace_bytes

def resident(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        result = func(*args, **(kwargs or {}))
        real = resident("VmHWM") - max(before, resident("VmRSS"))
        found.append([func.name(), real, workspace_bytes(func, args, result)])
        return result

torch.set_num_threads(1)
results = {}
for name, (setup, statements) in json.loads(sys.argv[1]).items():
    exec(setup)
    exec(statements)
    found = []
    with Calls():
        exec(statements)
    results[name] = found
print(json.dumps(results))
"""
CONVOLUTION = (
    """
torch.backends.mkldnn.enabled = {onednn}
x = torch.randn(*{size}, dtype=torch.{dtype}, requires_grad=True)
layer = torch.nn.{layer}.to(torch.{dtype})
""",
    "layer(x).sum().backward()",
)
LOG_SOFTMAX = (
    "x = torch.randn(4, 64, 64, 64)",
    """
torch.log_softmax(x, 1)
torch.log_softmax(x.to(memory_format=torch.channels_last), 1)
""",
)


def convolution(
    layer: str, dtype: str = "float32", size: tuple[int, ...] = (4, 32, 96, 96), *, onednn: bool = False
) -> tuple[str, str]:
    setup, statements = CONVOLUTION
    return setup.format(layer=layer, dtype=dtype, size=size, onednn=onednn), statements


CALLS = {
    "oneDNN": convolution("Conv2d(64, 64, 3, padding=1)", size=(4, 64, 96, 96), onednn=True),
    "1 x 1 with stride": convolution("Conv2d(64, 128, 1, 2)", size=(4, 64, 96, 96), onednn=True),
    "by channel": convolution("Conv2d(64, 64, 3, padding=1, groups=64)", size=(4, 64, 96, 96), onednn=True),
    "columns": convolution("Conv2d(32, 64, 3)"),
    "16 bits": convolution("Conv2d(32, 64, 3)", "bfloat16"),
    "no columns": convolution("Conv2d(32, 64, 1)", "bfloat16"),
    "columns by group": convolution("Conv2d(32, 32, 3, 2, padding=1, groups=4)", "bfloat16"),
    "dilated": convolution("Conv2d(32, 32, 3, dilation=2)", "bfloat16"),
    "transposed": convolution("ConvTranspose2d(32, 32, 3, 2)", "bfloat16"),
    "1D": convolution("Conv1d(32, 32, 3)", "bfloat16", (8, 32, 8192)),
    "3D": convolution("Conv3d(32, 16, 3)", "bfloat16", (4, 32, 16, 16, 16)),
    "3D transposed": convolution("ConvTranspose3d(32, 16, 3)", "bfloat16", (4, 32, 16, 16, 16)),
    "log-softmax": LOG_SOFTMAX,
}


@pytest.fixture(scope="module", name="measured")
def _measured() -> dict[str, list[tuple[str, int, int]]]:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURE, json.dumps(CALLS)]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    results: dict[str, list[tuple[str, int, int]]] = json.loads(out)
    return results


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", CALLS)
def test_no_call_takes_much_more_than_the_model_says(
    name: str, measured: dict[str, list[tuple[str, int, int]]]
) -> None:
    assert any(modelled > 1e6 for *_, modelled in measured[name])
    for function, real, modelled in measured[name]:
        assert real <= 1.1 * modelled + 1e6, function


def test_reserved_bytes_count_workspaces() -> None:
    with_workspace = mt.estimate(convolutions(4))
    assert with_workspace.reserved_bytes > with_workspace.peak_bytes + 10**6
    without = mt.estimate(LINEAR)
    assert without.reserved_bytes == pytest.approx(without.peak_bytes, rel=1e-3)


POLICIES = [mt.Policy.parse(""), mt.Policy.uniform(level=16), mt.Policy.uniform(level=4, store="derive")]


def test_a_profile_predicts_the_workspaces_of_any_policy_and_batch_size() -> None:
    profile = mt.profile(convolutions(4), options=[])
    for policy in POLICIES:
        for size in (4, 6):
            predicted = profile.predict(policy, batch_size=size)
            assert predicted.reserved_bytes is not None
            assert predicted.reserved_bytes > predicted.peak_bytes + 10**6
            estimated = mt.estimate(convolutions(size), policy).reserved_bytes
            assert predicted.reserved_bytes == pytest.approx(estimated, rel=1e-3)


def test_without_workspaces_a_step_reserves_its_peak() -> None:
    predicted = mt.profile(LINEAR, options=[]).predict(mt.Policy.uniform(level=16))
    assert predicted.reserved_bytes == predicted.peak_bytes
    assert predicted.workspaces_text == ""


def test_a_timeline_of_before_does_not_know_workspaces() -> None:
    profile = mt.profile(convolutions(4), options=[])
    document = json.loads(dump_json(profile.to_dict()))
    assert mt.Profile.from_dict(document).predict(POLICIES[1]) == profile.predict(POLICIES[1])
    for slot in document["timeline"]["slots"]:
        del slot["workspaces"]
    assert mt.Profile.from_dict(document).predict(POLICIES[1]).reserved_bytes is None


def test_a_budget_limits_the_bytes_with_workspaces() -> None:
    profile = mt.profile(convolutions(4), options=[mt.LayerSettings(level=16)], seeds=1)
    plain = profile.predict(mt.Policy.parse(""))
    assert plain.reserved_bytes is not None
    assert mt.search_policy(profile, plain.reserved_bytes).is_exact
    plan = mt.search_policy(profile, plain.reserved_bytes - 1)
    assert plan.budget_bytes is not None
    assert plain.peak_bytes < plan.budget_bytes
    assert not plan.is_exact
    assert plan.predicted.reserved_bytes is not None
    assert plan.predicted.reserved_bytes <= plan.budget_bytes
    assert mt.search_policy(profile, "90%").budget_bytes == int(0.9 * plain.reserved_bytes)


def convolutions(batch_size: int) -> mt.Workload:
    def build() -> nn.Module:
        blocks = (nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(6))
        return nn.Sequential(*blocks, nn.Conv2d(32, 1, 3))

    return mt.Workload(build, _images, _square, batch_size=batch_size)


def _images(size: int) -> torch.Tensor:
    return torch.randn(size, 32, 64, 64)


def _square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


LINEAR = mt.Workload(
    lambda: nn.Linear(64, 64), _images, lambda model, x: F.relu(model(x)).mean(), batch_size=4
)
