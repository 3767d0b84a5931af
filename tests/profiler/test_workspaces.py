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
CALL
call()
found = []
with Calls():
    call()
print(json.dumps(found))
"""
CONVOLUTION = """
x = torch.randn(4, {inputs}, 96, 96, requires_grad=True)
layer = torch.nn.Conv2d({inputs}, {outputs}, {kernel}, {stride}, {kernel} // 2, groups={groups})
def call():
    layer(x).sum().backward()
"""
LOG_SOFTMAX = """
x = torch.randn(4, 64, 64, 64)
def call():
    torch.log_softmax(x, 1)
    torch.log_softmax(x.to(memory_format=torch.channels_last), 1)
"""


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> str:
    return CONVOLUTION.format(inputs=inputs, outputs=outputs, kernel=kernel, stride=stride, groups=groups)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "call",
    [
        convolution(64, 64, 3),
        convolution(64, 128, 1, stride=2),
        convolution(64, 64, 3, groups=64),
        LOG_SOFTMAX,
    ],
    ids=["3 x 3", "1 x 1 with stride", "by channel", "log-softmax"],
)
def test_no_call_takes_much_more_than_the_model_says(call: str) -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURE.replace("CALL", call)]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    calls = json.loads(out)
    assert any(modelled > 1e6 for *_, modelled in calls)
    for name, real, modelled in calls:
        assert real <= 1.1 * modelled + 1e6, name


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
