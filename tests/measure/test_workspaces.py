"""What kernels of the CPU take within one call, beside the growth of resident memory around real calls."""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mesa_tune as mt
from mesa_tune.errors import RunError
from mesa_tune.measure.memory.workspaces import UntouchedBytes, workspace_bytes
from tests.builders import known
from tests.step_memory import Composed, second_step, squares

pytestmark = pytest.mark.slow("leaving")
MEASURE = """
import json, re, sys, torch
from pathlib import Path
from torch.utils._python_dispatch import TorchDispatchMode
from mesa_tune.measure.memory.workspaces import workspace_bytes

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
x = torch.randn(*{size}, dtype=torch.{dtype})
x = x.to(memory_format=torch.{layout}).requires_grad_()
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

CAST = (
    """
wide = torch.rand(16, 1 << 16) + 0.5
half, mask, by_row = wide.bfloat16(), wide > 0.9, wide[:, :1].clone()
""",
    """
wide + half
half.div(wide)
wide * mask
torch.where(mask, wide, half)
wide.lt(half)
mask * 0.5
half.mul_(by_row)
wide.mul_(half)
torch.addcmul(wide, half, half)
half.masked_fill(mask, 0.0)
""",
)
NORMS = (
    """
import mesa_tune as mt
x = torch.randn(4, 64, 64, 64, dtype=torch.bfloat16, requires_grad=True)
flat = torch.randn(8, 512, 256, dtype=torch.bfloat16, requires_grad=True)
layers = torch.nn.BatchNorm2d(64), torch.nn.GroupNorm(4, 64), torch.nn.LayerNorm(256)
def backward():
    with torch.autocast("cpu"), mt.compress_saved(mt.Policy.uniform(level=16)):
        outputs = layers[0](x), layers[1](x), layers[2](flat)
    for output in outputs:
        output.sum().backward()
""",
    "backward()",
)


def convolution(
    layer: str,
    dtype: str = "float32",
    size: tuple[int, ...] = (4, 32, 96, 96),
    *,
    onednn: bool = False,
    layout: str = "contiguous_format",
) -> tuple[str, str]:
    setup, statements = CONVOLUTION
    return setup.format(layer=layer, dtype=dtype, size=size, onednn=onednn, layout=layout), statements


BY_CHANNEL: tuple[str, tuple[int, ...]] = ("bfloat16", (4, 96, 56, 56))
DEEP = ((2, 384, 14, 14),)
LAST: dict[str, Any] = {"onednn": True, "layout": "channels_last"}
CALLS = {
    "oneDNN": convolution("Conv2d(64, 64, 3, padding=1)", size=(4, 64, 96, 96), onednn=True),
    "1 x 1 with stride": convolution("Conv2d(64, 128, 1, 2)", size=(4, 64, 96, 96), onednn=True),
    "by channel": convolution("Conv2d(64, 64, 3, padding=1, groups=64)", size=(4, 64, 96, 96), onednn=True),
    "7 x 7 by channel": convolution("Conv2d(96, 96, 7, groups=96)", *BY_CHANNEL, **LAST),
    "3 x 3 by channel": convolution("Conv2d(96, 96, 3, groups=96)", *BY_CHANNEL, **LAST),
    "groups, channels last": convolution("Conv2d(96, 192, 3, groups=24)", *BY_CHANNEL, **LAST),
    "by channel with stride": convolution("Conv2d(96, 96, 3, 2, groups=96)", *BY_CHANNEL, onednn=True),
    "7 x 7 by channel, float32": convolution("Conv2d(384, 384, 7, groups=384)", "float32", *DEEP, **LAST),
    "large weights": convolution("Conv2d(384, 768, 2, 2)", "float32", *DEEP, **LAST),
    "large weights, 16 bits": convolution("Conv2d(384, 768, 2, 2)", "bfloat16", *DEEP, **LAST),
    "large weights, contiguous": convolution("Conv2d(384, 768, 3)", "bfloat16", *DEEP, onednn=True),
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
    "cast": CAST,
    "norms of 16 bits": NORMS,
}


@pytest.fixture(scope="module", name="measured")
def _measured() -> dict[str, list[tuple[str, int, int]]]:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURE, json.dumps(CALLS)]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    results: dict[str, list[tuple[str, int, int]]] = json.loads(out)
    return results


BFLOAT16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs AVX-512 with bfloat16"
)
REARRANGED = "large weights, 16 bits"  # by oneDNN, where it has kernels for them


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[BFLOAT16] if name == REARRANGED else []) for name in CALLS]
)
def test_no_call_takes_much_more_than_the_model_says(
    name: str, measured: dict[str, list[tuple[str, int, int]]]
) -> None:
    assert any(modelled > 1e6 for *_, modelled in measured[name])
    for function, real, modelled in measured[name]:
        assert real <= 1.1 * modelled + 1e6, function


IMAGES, VOLUMES = (4, 8, 12, 12), (4, 8, 6, 6, 6)
SMALL: dict[str, tuple[tuple[str, str], tuple[int, int]]] = {
    "oneDNN": (convolution("Conv2d(8, 16, 3)", "float32", IMAGES, onednn=True), (30208, 74240)),
    "stride": (convolution("Conv2d(8, 16, 3, 2)", "float32", IMAGES, onednn=True), (23040, 54272)),
    "channels last": (convolution("Conv2d(8, 16, 3)", "float32", IMAGES, **LAST), (34816, 83456)),
    "padded": (convolution("Conv2d(8, 16, 5, groups=4)", size=IMAGES, **LAST), (24832, 102400)),
    "columns": (convolution("Conv2d(8, 16, 3)", size=IMAGES), (115200, 140800)),
    "16 bits": (convolution("Conv2d(8, 16, 3)", "bfloat16", IMAGES), (57600, 70400)),
    "no columns": (convolution("Conv2d(8, 16, 1)", "bfloat16", IMAGES), (0, 25344)),
    "groups": (convolution("Conv2d(8, 16, 3, 2, 1, groups=4)", "bfloat16", IMAGES), (7488, 13824)),
    "dilated": (convolution("Conv2d(8, 16, 3, dilation=2)", size=IMAGES), (18432, 34816)),
    "transposed": (convolution("ConvTranspose2d(8, 16, 3, 2)", "bfloat16", IMAGES), (248832, 121472)),
    "1D": (convolution("Conv1d(8, 16, 3)", size=(4, 8, 50)), (18432, 30720)),
    "3D": (convolution("Conv3d(8, 16, 3)", "bfloat16", VOLUMES), (110592, 174080)),
    "3D transposed": (convolution("ConvTranspose3d(8, 16, 3)", "bfloat16", VOLUMES), (559872, 383232)),
}
"""Small calls, and the bytes of forward and backward of the model that the large ones above bear out."""


class Modelled(TorchDispatchMode):
    """Collects what the model says of convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "convolution" in func.name():
            self.found.append(workspace_bytes(func, args, result))
        return result


@pytest.mark.parametrize("name", SMALL)
def test_the_model_of_a_call_is_that_which_was_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (setup, statements), expected = SMALL[name]
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", torch.backends.mkldnn.enabled)  # restored after
    names: dict[str, Any] = {"torch": torch}
    exec(setup, names)
    with Modelled() as modelled:
        exec(statements, names)
    assert tuple(modelled.found) == expected


@BFLOAT16
def test_what_onednn_compiles_is_counted_once_for_each_shape() -> None:
    def layers(count: int) -> mt.Workload:
        model = lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(count)))  # noqa: E731
        return mt.Workload(model, partial(_rows, 64), squares, batch_size=4, autocast="bfloat16")

    one, two, three = (mt.estimate(layers(count)) for count in (1, 2, 3))
    compiled = [fit.library_bytes for fit in (one, two, three)]
    assert 10**6 < compiled[0] < compiled[1] == compiled[2]
    profiled = mt.profile(layers(2), options=[]).predict(mt.Policy.parse(""))
    assert profiled.library_bytes == compiled[1]
    assert profiled.peak_bytes == pytest.approx(two.peak_bytes, abs=1000)
    assert two.needed_bytes > math.ceil(1.03 * two.peak_bytes) + compiled[1]


def test_the_peak_counts_workspaces_and_tensors_stand_alone() -> None:
    fit = mt.estimate(convolutions(4))
    assert fit.peak_bytes > fit.tensor_bytes + 10**6
    without = mt.estimate(LINEAR)
    assert without.peak_bytes == pytest.approx(without.tensor_bytes, rel=1e-3)


POLICIES = [mt.Policy.parse(""), mt.Policy.uniform(level=16), mt.Policy.uniform(level=4, store="derive")]


@pytest.fixture(scope="module", name="profile")
def _profile() -> mt.Profile:
    return mt.profile(convolutions(4), options=[mt.LayerSettings(level=16)], seeds=1)


def test_a_profile_predicts_the_workspaces_of_any_policy_and_batch_size(profile: mt.Profile) -> None:
    for policy in POLICIES:
        for size in (4, 6):
            predicted = profile.predict(policy, batch_size=size).peak_bytes
            work = convolutions(size)
            assert predicted == pytest.approx(mt.estimate(work, policy).peak_bytes, rel=1e-3)
            assert predicted == pytest.approx(second_step(work, policy).peak_bytes, rel=1e-3)


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=BFLOAT16)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_most_of_the_workspace_of_an_lstm_is_never_written(bidirectional: bool, autocast: bool) -> None:
    """In a process whose large tensors are always fresh pages: pages used before count as written."""
    call = f"from tests.measure import test_workspaces as t; t.check_lstm({bidirectional}, {autocast})"
    fresh = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    subprocess.run([sys.executable, "-c", call], env=fresh, cwd=Path(__file__).parents[2], check=True)


def check_lstm(bidirectional: bool, autocast: bool) -> None:
    layer = nn.LSTM(256, 320, bidirectional=bidirectional)
    x = torch.randn(64, 48, 256, requires_grad=True)
    with Workspaces() as forward, torch.autocast("cpu", enabled=autocast):
        y = layer(x)[0].sum()
    assert forward.untouched.nbytes == pytest.approx(sum(map(unwritten, forward.found)), rel=0.03)
    forward.found.clear()
    with forward:
        y.backward()
    assert forward.untouched.nbytes == pytest.approx(sum(map(unwritten, forward.found)), rel=0.08)


class Workspaces(TorchDispatchMode):
    """Collects the workspaces of LSTMs, and what is thought to be untouched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[torch.Tensor] = []
        self.untouched = UntouchedBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.untouched.see(func, args, result)
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            self.found.append(result[3])
        elif func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
            self.found.append(args[-1])
        return result


def unwritten(tensor: torch.Tensor) -> int:
    """Return the bytes of `tensor` without those of its pages that are in memory."""
    page = os.sysconf("SC_PAGESIZE")
    start = tensor.data_ptr() // page * page
    count = -(-(tensor.data_ptr() + tensor.nbytes - start) // page)
    resident = (ctypes.c_ubyte * count)()
    size = ctypes.c_size_t(count * page)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), size, resident) == 0
    return tensor.nbytes - page * sum(flags & 1 for flags in resident)


def test_an_lstm_needs_less_than_its_tensors_have() -> None:
    model = lambda: Composed(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(64, 128))  # noqa: E731
    work = mt.Workload(model, lambda size: torch.randn(32, size, 64), squares, batch_size=16)
    predicted, step = mt.profile(work, options=[]).predict(POLICIES[0]), second_step(work, POLICIES[0])
    assert predicted.peak_bytes == pytest.approx(step.peak_bytes, rel=1e-3)
    assert step.peak_bytes < 0.9 * step.tensor_bytes
    assert predicted.peak is not None
    assert sum(predicted.peak.bytes.values()) == predicted.peak_bytes


def test_a_loaded_profile_predicts_as_before_and_an_older_one_is_refused(
    profile: mt.Profile, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    assert mt.Profile.load(path).predict(POLICIES[1]) == profile.predict(POLICIES[1])
    document = json.loads(path.read_text())
    for slot in document["timeline"]["slots"]:
        slot.update(slot.pop("once"))  # as it was before
    path.write_text(json.dumps(document))
    with pytest.raises(RunError, match="profile"):
        mt.Profile.load(path)


def test_a_budget_limits_the_bytes_with_workspaces(profile: mt.Profile) -> None:
    plain = profile.predict(mt.Policy.parse(""))
    assert mt.search_policy(profile, plain.peak_bytes).is_exact
    plan = mt.search_policy(profile, plain.peak_bytes - 1)
    assert not plan.is_exact
    assert plan.predicted.peak_bytes <= known(plan.budget_bytes)
    assert mt.search_policy(profile, "90%").budget_bytes == int(0.9 * plain.peak_bytes)


def convolutions(batch_size: int) -> mt.Workload:
    def build() -> nn.Module:
        blocks = (nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(3))
        return nn.Sequential(*blocks, nn.Conv2d(32, 1, 3))

    return mt.Workload(build, _images, squares, batch_size=batch_size)


def _rows(width: int, size: int) -> torch.Tensor:
    return torch.randn(size, width)


def _images(size: int) -> torch.Tensor:
    return torch.randn(size, 32, 64, 64)


LINEAR = mt.Workload(
    lambda: nn.Linear(64, 64), _images, lambda model, x: F.relu(model(x)).mean(), batch_size=4
)
