"""`verify` against an independent count, and the command around it."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mesa_tune import ops
from mesa_tune.cli import run
from mesa_tune.commands.verify import describe
from mesa_tune.errors import RunError
from mesa_tune.measure import verification
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.measure.memory import meter
from mesa_tune.measure.verification import verify
from mesa_tune.policy import Policy
from mesa_tune.profiles.own_noise import GradientError
from mesa_tune.profiles.profile import Prediction
from mesa_tune.profiles.verification import BATCHES, Measured, Ratio, Verification
from mesa_tune.workload.workload import Workload
from tests.builders import Capture, Patch, known, workload
from tests.step_memory import regression
from tests.synthetic import COARSE, synthetic_profile

WIDTH, SAMPLES = 64, 128
KEPT = SAMPLES * WIDTH  # elements of each hidden tensor: above the 4,096 that stay exact

MODEL_FILE = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

def batch(batch_size):
    return torch.randn(batch_size, 64), torch.randn(batch_size, 64)

def loss(model, batch):
    return (model(batch[0]) - batch[1]).abs().mean()

BATCH_SIZE = 128
"""


WORKLOAD = workload(
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
    lambda size: (torch.randn(size, WIDTH), torch.randn(size, WIDTH)),
    regression,
    batch_size=SAMPLES,
)


def checked_anew(policy: Policy) -> Verification:
    return verify(WORKLOAD, policy, steps=2, seeds=3)


checked = cache(checked_anew)


class TestVerify:
    def test_saved_bytes_are_those_counted_by_hand(self) -> None:
        found = checked(Policy.uniform(level=16))
        # Two hidden tensors, and the prediction that the loss keeps.
        assert found.baseline.saved_bytes == 3 * 4 * KEPT
        packed = ops.packed_bytes(KEPT, 4)
        assert 2 * packed <= known(found.policy.saved_bytes) <= 3 * packed + 4 * KEPT

    def test_less_is_kept_the_fewer_the_bits(self) -> None:
        four, eight = checked(Policy.uniform(level=16)), checked(Policy.uniform(level=256))
        assert known(four.policy.saved_bytes) < known(eight.policy.saved_bytes)
        assert four.baseline.peak_bytes == eight.baseline.peak_bytes
        assert 50 * known(eight.gradient_error) < known(four.gradient_error)

    def test_nothing_changes_under_the_empty_policy(self) -> None:
        found = checked(Policy())
        assert found.policy.saved_bytes == found.baseline.saved_bytes
        assert found.policy.peak_bytes == found.baseline.peak_bytes
        assert set(found.gradient_errors) == {0.0}

    def test_errors_differ_by_seed_and_repeat(self) -> None:
        first, second = (check(Policy.uniform(level=4)).gradient_errors for check in (checked, checked_anew))
        assert len(set(first)) == 3 * BATCHES
        assert first == second

    def test_a_gradient_that_is_not_finite_is_an_error(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(
            JointError, "errors", lambda *_: [GradientError(0.1, 0.2), GradientError(math.inf, math.inf)]
        )
        with pytest.raises(RunError, match="infinite or NaN"):
            checked_anew(Policy.uniform(level=4))

    def test_callers_random_states_are_as_before(self) -> None:
        before = torch.get_rng_state()
        verify(WORKLOAD, Policy.uniform(), steps=1, seeds=1)
        assert torch.equal(torch.get_rng_state(), before)

    def test_prediction_is_kept_beside(self) -> None:
        expected = Prediction(1, 2, 3.0, 4.0)
        assert verify(WORKLOAD, Policy(), predicted=expected, steps=1, seeds=1).predicted == expected

    @pytest.mark.parametrize(("steps", "seeds"), [(0, 1), (1, 0)])
    def test_refuses_no_steps_and_no_seeds(self, steps: int, seeds: int) -> None:
        with pytest.raises(RunError, match=f"steps={steps}, seeds={seeds}"):
            verify(WORKLOAD, Policy(), steps=steps, seeds=seeds)

    def test_where_plain_does_not_fit_exact_gradients_come_from_checkpoints(self, monkeypatch: Patch) -> None:
        run_out_of_memory(monkeypatch, calls={0})
        found = checked_anew(Policy.uniform(level=16))
        assert found.baseline == Measured(None, None, None)
        assert found.step_ratio is None
        assert found.gradient_errors == checked(Policy.uniform(level=16)).gradient_errors
        assert found.gradient_noise_ratio
        assert found.policy.saved_bytes
        assert found.policy.step_ms

    def test_where_the_policy_does_not_fit_says_so(self, monkeypatch: Patch) -> None:
        run_out_of_memory(monkeypatch, calls={0, 1})
        with pytest.raises(RunError, match="batch size 128 does not fit under this policy"):
            checked_anew(Policy.uniform(level=16))


def run_out_of_memory(monkeypatch: Patch, calls: set[int]) -> None:
    """Let the measurements of these numbers run out of memory."""
    number = itertools.count()

    def called(*arguments: Any, **more: Any) -> object:
        if next(number) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return meter.measure_second_step(*arguments, **more)

    monkeypatch.setattr(verification, "measure_second_step", called)


class TestDocument:
    MEASURED = Measured(100, 80, 5.0), Measured(50, 20, 6.0), (0.1, 0.3), Ratio(1.2, 1.1, 1.3)
    FOUND = Verification(*MEASURED, Prediction(20, 50, 0.1, None), "cpu", 8, "2.13.0", 5)

    def test_has_the_contracts_keys(self) -> None:
        document = self.FOUND.to_dict()
        assert document["schema"] == "mesa-tune.verify/2"
        assert document["baseline"] == {"peak_bytes": 100, "saved_bytes": 80, "step_ms": 5.0}
        assert document["policy"]["gradient_error"] == pytest.approx(0.2)
        assert document["policy"]["gradient_noise_ratio"] is None
        assert document["predicted"]["peak_bytes"] == 50

    def test_of_times_only_the_ratio_is_predicted(self) -> None:
        found = replace(self.FOUND, predicted=Prediction(20, 50, 0.1, 30.0))
        beside = found.predicted_beside(20.0)
        assert beside == Prediction(20, 50, 0.1, 7.5)
        (line,) = [line for line in describe(found, 20.0) if line.startswith("step time")]
        assert line.split() == ["step", "time", "5.00", "ms", "7.50", "ms", "6.00", "ms"]
        assert self.FOUND.predicted_beside(20.0) == self.FOUND.predicted

    @pytest.mark.parametrize("change", [{}, {"step_ratio": None, "predicted": None, "gradient_errors": ()}])
    def test_loads_as_it_was_saved(self, tmp_path: Path, change: dict[str, Any]) -> None:
        found = replace(self.FOUND, **change)
        found.save(tmp_path / "verify.json")
        assert Verification.load(tmp_path / "verify.json") == found

    def test_of_another_kind_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "verify.json").write_text('{"schema": "mesa-tune.profile/1"}')
        with pytest.raises(RunError, match=r"mesa-tune\.profile/1"):
            Verification.load(tmp_path / "verify.json")


class TestCommand:
    HEADER = replace(Policy.uniform(level=16).header, budget="6.00 GB")
    BUDGETED = replace(Policy.uniform(level=16), header=HEADER).dumps()

    @pytest.fixture(name="folder")
    def _folder(self, tmp_path: Path) -> Path:
        """A run whose profile names a real model file, and a policy for it."""
        path = tmp_path / "model.py"
        path.write_text(MODEL_FILE)
        made_from = Workload.load(path, device="cpu")
        names: dict[str, Any] = {"model": str(path), "fingerprint": made_from.fingerprint}
        made = replace(synthetic_profile(1, grid=COARSE), batch_size=made_from.batch_size, **names)
        made.save(tmp_path / "run" / "profile.json")
        (tmp_path / "run" / "policy.txt").write_text(Policy.uniform(level=16).dumps())
        return tmp_path / "run"

    def verify(self, folder: Path, *options: str) -> int:
        return run(["verify", "--run", str(folder), "--steps", "1", "--seeds", "1", *options])

    def test_prints_a_table_of_80_columns_and_writes(self, folder: Path, capsys: Capture) -> None:
        assert self.verify(folder) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "device: cpu"
        table = [line for line in lines if not line.startswith(("policy", "wrote", "next"))]
        assert max(map(len, table)) <= 80
        assert any("predicted" in line and "measured" in line for line in lines)
        assert Verification.load(folder / "verify.json").batch_size == 128

    def test_predicts_nothing_for_modules_that_run_again(self, folder: Path, capsys: Capture) -> None:
        rule = "# mesa-tune policy 1\non module:\n    by_name: *\n    store: recompute\n"
        (folder / "policy.txt").write_text(rule)
        assert self.verify(folder) == 0
        out = capsys.readouterr().out
        assert "nothing is predicted: 'blocks" in out
        (saved,) = [line for line in out.splitlines() if line.startswith("saved bytes")]
        assert "–" in saved
        assert Verification.load(folder / "verify.json").predicted is None

    def test_names_the_budget_that_the_policy_is_for(self, folder: Path, capsys: Capture) -> None:
        (folder / "policy.txt").write_text(self.BUDGETED)
        assert self.verify(folder) == 0
        assert "for a budget of 6.00 GB, batch 128: 1 step of each, in turn" in capsys.readouterr().out

    def test_after_force_the_same_is_the_same(self, folder: Path) -> None:
        (folder / "policy.txt").write_text(self.BUDGETED)
        path = str(folder / "policy.txt")
        assert self.verify(folder, "--policy", path, "--force") == 0
        assert self.verify(folder, "--policy", path) == 0
        assert self.verify(folder) == 0

    def test_says_what_keeps_memory_high(self, folder: Path, capsys: Capture, monkeypatch: Patch) -> None:
        monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
        monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
        assert self.verify(folder) == 0
        assert "MALLOC_MMAP_THRESHOLD_=65536" in capsys.readouterr().out
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        assert self.verify(folder) == 0
        assert "MALLOC" not in capsys.readouterr().out

    def test_json_is_the_document(self, folder: Path, capsys: Capture) -> None:
        assert self.verify(folder, "--json") == 0
        assert json.loads(capsys.readouterr().out) == json.loads((folder / "verify.json").read_text())

    def test_of_another_policy_is_written_beside(self, folder: Path, capsys: Capture) -> None:
        other = folder / "policy-other.txt"
        assert self.verify(folder) == 0
        own = (folder / "verify.json").read_text()
        for level in (4, 8):  # of a file that was changed since, too
            other.write_text(Policy.uniform(level=level).dumps())
            assert self.verify(folder, "--policy", str(other)) == 0
            assert f"wrote {folder / 'verify-other.json'}\n" in capsys.readouterr().out
        assert (folder / "verify.json").read_text() == own
        assert Verification.load(folder / "verify-other.json").predicted is not None

    def test_results_that_were_edited_need_force(self, folder: Path, capsys: Capture) -> None:
        assert self.verify(folder) == 0
        with (folder / "verify.json").open("a") as file:
            file.write("\n")
        assert self.verify(folder) == 1
        assert "--force" in capsys.readouterr().err
