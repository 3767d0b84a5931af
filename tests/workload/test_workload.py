from __future__ import annotations

import functools
import random
import textwrap
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from mesa_tune.errors import BudgetError, WorkloadError
from mesa_tune.workload.batches import to_device
from mesa_tune.workload.user_code import explaining, is_out_of_memory, seeded
from mesa_tune.workload.workload import DEFAULT_BATCH_SIZE, Workload
from tests.builders import no_trace

GOOD = """\
import torch
from torch import nn

def model():
    return nn.Linear(4, 2)

def batch(batch_size):
    return torch.randn(batch_size, 4)

def loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes model.py in the current folder, which is fresh."""
    monkeypatch.chdir(tmp_path)

    def to_model_file(source: str) -> Path:
        path = Path("model.py")
        path.write_text(textwrap.dedent(source))
        return path

    return to_model_file


def linear(**changes: Any) -> Workload:
    """A workload of one linear layer, with `changes`."""
    parts: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 2),
        "batch": lambda n: torch.randn(n, 4),
        "loss": lambda model, batch: model(batch).square().mean(),
        "batch_size": 3,
    }
    return Workload(**(parts | changes))


def message(error: pytest.ExceptionInfo[WorkloadError]) -> str:
    text = str(error.value)
    assert len(text.splitlines()) <= 3, text
    return text


# Loading


def test_a_model_file_makes_a_workload(write: Callable[[str], Path]) -> None:
    path = write(GOOD + "BATCH_SIZE = 5\nAUTOCAST = 'bfloat16'\n")
    loaded = Workload.load(path)
    assert (loaded.batch_size, loaded.autocast, loaded.path) == (5, "bfloat16", path)
    overridden = Workload.load(path, batch_size=7, device="cpu", autocast="float16")
    assert (overridden.batch_size, overridden.device, overridden.autocast) == (7, "cpu", "float16")
    assert Workload.load(path, autocast="none").autocast is None


def test_what_a_model_file_may_leave_out(write: Callable[[str], Path]) -> None:
    loaded = Workload.load(write(GOOD))
    assert (loaded.batch_size, loaded.autocast, loaded.optimizer) == (DEFAULT_BATCH_SIZE, None, None)


def test_a_changed_file_is_read_afresh(write: Callable[[str], Path]) -> None:
    loaded = [Workload.load(write(GOOD.replace("4, 2", f"4, {width}"))) for width in (2, 8)]
    assert [each.build().get_parameter("weight").shape[0] for each in loaded] == [2, 8]
    assert len({each.fingerprint for each in loaded}) == 2


def test_the_description_is_plain(write: Callable[[str], Path]) -> None:
    loaded = Workload.load(write(GOOD), batch_size=2, device="cpu")
    step = {"device": "cpu", "autocast": None, "batch_size": 2, "seed": 0}
    model = {"model": str(Path("model.py").resolve()), "fingerprint": loaded.fingerprint}
    assert loaded.description == model | step


BAD_FILES = {
    "syntax error": ("def model(:\n", ["model.py:1", "SyntaxError", "def model(:"]),
    "null byte": ("x = 1\0", ["model.py", "null byte"]),
    "raises": (GOOD + "1 / 0\n", ["model.py:12", "ZeroDivisionError", "1 / 0"]),
    "exits": (GOOD + "raise SystemExit(0)\n", ["model.py:12", "SystemExit"]),
    "missing import": ("import no_such_module\n", ["model.py:1", "ModuleNotFoundError", "no_such_module"]),
    "no model": (GOOD.replace("def model", "def net"), ["model.py", "model is missing", "mesa-tune init"]),
    "no batch": (GOOD.replace("def batch", "def data"), ["batch is missing", "batch(batch_size)"]),
    "no loss": (GOOD.replace("def loss", "def cost"), ["model.py", "loss is missing", "loss(model, batch)"]),
    "loss is no function": (GOOD + "loss = 3\n", ["loss is a int"]),
    "optimizer is no function": (GOOD + "optimizer = 'adam'\n", ["optimizer is a str"]),
    "batch size is text": (GOOD + "BATCH_SIZE = '8'\n", ["batch size '8'", "BATCH_SIZE"]),
    "batch size is zero": (GOOD + "BATCH_SIZE = 0\n", ["batch size 0"]),
    "autocast is unknown": (GOOD + "AUTOCAST = 'int8'\n", ["autocast 'int8'", "bfloat16"]),
}


@pytest.mark.parametrize(("source", "said"), BAD_FILES.values(), ids=list(BAD_FILES))
def test_a_bad_model_file_is_explained(write: Callable[[str], Path], source: str, said: list[str]) -> None:
    with pytest.raises(WorkloadError) as raised:
        Workload.load(write(source))
    for part in said:
        assert part in message(raised)


@pytest.mark.parametrize("name", ["nowhere.py", "."], ids=["missing", "a folder"])
def test_a_model_file_that_cannot_be_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkloadError, match=r"no such file|cannot be read") as raised:
        Workload.load(name)
    assert message(raised).startswith(name)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:99", "meta", ""])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(WorkloadError, match="device") as raised:
        linear(device=device)
    assert "--device" in message(raised)


# The user's functions: what they raise


def broken(name: str, line: str) -> str:
    return GOOD.replace(f"def {name}", f"def plain_{name}") + f"\ndef {name}(*arguments):\n    {line}\n"


@pytest.mark.parametrize("name", ["model", "batch", "loss", "optimizer"])
def test_an_error_in_a_function_names_its_line(write: Callable[[str], Path], name: str) -> None:
    loaded = Workload.load(write(broken(name, "return {}['images']")), device="cpu")
    calls: dict[str, Callable[[], object]] = {
        "model": loaded.build,
        "batch": loaded.make_batch,
        "loss": lambda: loaded.compute_loss(nn.Linear(1, 1), None),
        "optimizer": lambda: loaded.make_optimizer(nn.Linear(1, 1)),
    }
    with pytest.raises(WorkloadError) as raised:
        calls[name]()
    line = len(broken(name, "").splitlines())
    assert f"model.py:{line}: {name}() raised KeyError: 'images'" in message(raised)
    assert "return {}['images']" in message(raised)
    assert isinstance(raised.value.__cause__, KeyError)


def test_errors_inside_torch_and_of_wrong_arguments_name_the_users_line(write: Callable[[str], Path]) -> None:
    loaded = Workload.load(write(GOOD.replace("randn(batch_size, 4)", "randn(batch_size, 5)")), device="cpu")
    with pytest.raises(WorkloadError, match=r"model\.py:11: loss\(\).*RuntimeError"):
        loaded.compute_loss(loaded.build(), loaded.make_batch())
    loaded = Workload.load(write(GOOD.replace("def batch(batch_size)", "def batch()")), device="cpu")
    with pytest.raises(WorkloadError, match=r"model\.py:7: batch\(\).*takes 0 positional arguments"):
        loaded.make_batch()


def test_a_long_message_is_cut() -> None:
    def fail(n: int) -> Tensor:
        raise ValueError("x" * 5000 + "\nand a second line")

    with pytest.raises(WorkloadError) as raised:
        linear(batch=fail).make_batch()
    assert len(message(raised)) < 1000


def test_functions_of_all_kinds_have_a_place() -> None:
    class Batches:
        def __call__(self, n: int) -> Tensor:
            raise KeyError("images")

    def plain(n: int, size: int) -> Tensor:
        raise KeyError("images")

    for function in (Batches(), functools.partial(plain, size=4), functools.lru_cache(Batches().__call__)):
        with pytest.raises(WorkloadError, match=r"test_workload\.py:\d+: batch\(\) raised KeyError"):
            linear(batch=function).make_batch()


def test_our_own_errors_pass() -> None:
    with pytest.raises(BudgetError), explaining("loss()"):
        raise BudgetError("too small")


OUT_OF_MEMORY = {
    "host": MemoryError(),
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "torch's host allocator": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    "enforce": RuntimeError("[enforce fail at alloc_cpu.cpp:124] . not enough memory: you tried"),
}


@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=list(OUT_OF_MEMORY))
def test_lack_of_memory_stays_recognizable(error: Exception) -> None:
    def fail(model: nn.Module, batch: Any) -> Tensor:
        raise error

    with pytest.raises(type(error)) as raised:
        linear(loss=fail).compute_loss(nn.Linear(1, 1), None)
    assert is_out_of_memory(raised.value)
    wrapped = ValueError("step failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


def test_torch_itself_is_recognized_when_memory_lacks_and_no_other_error_is() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    assert not any(map(is_out_of_memory, [RuntimeError("shape mismatch"), ValueError("out of memory"), None]))


# The user's functions: what they return


def test_a_model_must_be_a_module() -> None:
    with pytest.raises(WorkloadError, match=r"model\(\) returned .*not an nn\.Module") as raised:
        linear(model=lambda: nn.Linear).build()
    assert "test_workload.py:" in message(raised)


BAD_LOSSES: dict[str, tuple[Callable[[nn.Module, Tensor], object], str]] = {
    "None": (lambda model, batch: None, "returned None"),
    "number": (lambda model, batch: model(batch).mean().item(), "returned a float, not a tensor"),
    "dict": (lambda model, batch: {"loss": model(batch).mean()}, "returned a dict"),
    "vector": (lambda model, batch: model(batch).mean(1), r"shape \(3,\), not a scalar(.|\n)*\.mean\(\)"),
    "no gradient": (lambda model, batch: model(batch).mean().detach(), "no gradient"),
    "NaN": (lambda model, batch: model(batch).mean() * float("nan"), "returned nan"),
    "infinite": (lambda model, batch: model(batch).mean() * float("inf"), r"returned -?inf"),
}


@pytest.mark.parametrize(("loss", "said"), BAD_LOSSES.values(), ids=list(BAD_LOSSES))
def test_a_bad_loss_is_explained(loss: Callable[[nn.Module, Tensor], object], said: str) -> None:
    made = linear(loss=loss)
    with pytest.raises(WorkloadError, match=said) as raised:
        made.compute_loss(made.build(), made.make_batch())
    assert "test_workload.py:" in message(raised)
    assert "loss()" in message(raised)


def test_a_loss_is_read_only_on_demand() -> None:
    made = linear(loss=BAD_LOSSES["infinite"][0])
    assert not made.compute_loss(made.build(), made.make_batch(), check=False).isfinite()


def test_without_gradients_a_loss_needs_none() -> None:
    made = linear()
    with torch.no_grad():
        assert not made.compute_loss(made.build(), made.make_batch()).requires_grad


def test_autocast_reaches_the_loss() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        output: Tensor = model(batch)
        assert output.dtype == torch.bfloat16
        return output.float().mean()

    made = linear(loss=loss, autocast="bfloat16")
    made.compute_loss(made.build(), made.make_batch())
    assert not torch.is_autocast_enabled("cpu")


def test_the_default_optimizer_is_adamw_over_what_is_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    optimizer = linear().make_optimizer(model)
    assert isinstance(optimizer, torch.optim.AdamW)
    (group,) = optimizer.param_groups
    assert list(map(id, group["params"])) == list(map(id, model[0].parameters()))


def test_an_optimizer_must_be_one() -> None:
    with pytest.raises(WorkloadError, match=r"optimizer\(\) returned a list, not an Optimizer"):
        linear(optimizer=list).make_optimizer(nn.Linear(1, 1))


# Random numbers


def test_models_and_batches_repeat() -> None:
    made = linear()
    assert torch.equal(made.build().get_parameter("weight"), made.build().get_parameter("weight"))
    assert torch.equal(made.make_batch(), made.make_batch())
    assert not torch.equal(made.make_batch(draw=0), made.make_batch(draw=1))
    assert not torch.equal(made.make_batch(), linear(seed=1).make_batch())
    assert made.make_batch(5).shape == (5, 4)


def test_batches_of_numpy_and_random_repeat() -> None:
    made = linear(batch=lambda n: (np.random.rand(n).tolist(), random.random()))
    first, again, other = made.make_batch(), made.make_batch(), made.make_batch(draw=1)
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]


def test_the_callers_random_numbers_are_untouched() -> None:
    made = linear(batch=lambda n: (torch.randn(n, 4), np.random.rand(), random.random())[0])
    with no_trace(nn.Module()):
        made.build()
        made.make_batch()


def test_the_callers_random_numbers_survive_an_error() -> None:
    state = torch.get_rng_state()
    with pytest.raises(KeyError), seeded(3, "cpu"):
        raise KeyError
    assert torch.equal(state, torch.get_rng_state())


def test_a_built_model_trains() -> None:
    assert linear(model=lambda: nn.Dropout().eval()).build().training


# Batches


@dataclass(frozen=True)
class Pair:
    images: Tensor
    name: str


class Opaque:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Movable(Opaque):
    def to(self, device: str) -> Movable:
        return Movable(self.tensor.to(device))


Named = namedtuple("Named", "images labels")


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (dict, UserDict)):
        return [tensor for item in value.values() for tensor in tensors(item)]
    if isinstance(value, (list, tuple, set)):
        return [tensor for item in value for tensor in tensors(item)]
    return [tensor for item in getattr(value, "__dict__", {}).values() for tensor in tensors(item)]


ONES = torch.ones(2)
BATCHES: dict[str, Any] = {
    "tensor": ONES,
    "tuple": (ONES, "text", 3),
    "nested": [{"a": (ONES, [ONES])}],
    "named tuple": Named(ONES, ONES),
    "dataclass": Pair(ONES, "name"),
    "user dict": UserDict(a=ONES),
    "set": {ONES},
    "with a method": Movable(ONES),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
def test_tensors_are_moved_wherever_they_are(batch: Any) -> None:
    moved = to_device(batch, "meta")
    assert type(moved) is type(batch)
    assert [tensor.device.type for tensor in tensors(moved)] == ["meta"] * len(tensors(batch))
    assert all(tensor.device.type == "cpu" for tensor in tensors(batch))


def test_what_holds_no_tensors_is_left_alone() -> None:
    batch = ["text", 3, None, object()]
    assert to_device(batch, "meta") == batch


def test_a_batch_of_transformers_moves_itself() -> None:
    assert to_device(BatchEncoding({"x": ONES}), "meta")["x"].is_meta


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"a": [t]}, Opaque])
def test_a_batch_on_the_wrong_device_is_explained(wrap: Callable[[Tensor], Any]) -> None:
    with pytest.raises(WorkloadError, match="meta") as raised:
        linear(batch=lambda n: wrap(torch.ones(n, device="meta"))).make_batch()
    assert "test_workload.py:" in message(raised)
    assert "batch() returned" in message(raised)


@pytest.mark.gpu
def test_batches_and_models_go_to_the_gpu() -> None:
    made = linear(device="cuda")
    model, batch = made.build(), made.make_batch()
    assert batch.is_cuda
    assert made.compute_loss(model, batch).is_cuda
    apart = linear(device="cuda", loss=lambda model, batch: model(batch).mean() + torch.ones(3))
    with pytest.raises(WorkloadError, match="same device") as raised:
        apart.compute_loss(model, batch)
    assert "device=" in message(raised)
