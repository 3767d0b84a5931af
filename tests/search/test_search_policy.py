"""`search_policy` and its plan: budgets, other batches, texts, documents; and one real workload."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mesa_tune.errors import BudgetError, RunError
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.profile import Profile
from mesa_tune.search import Plan, search_policy
from mesa_tune.workload.workload import Workload
from tests.builders import cross_entropy, known
from tests.synthetic import COARSE, is_sorted, synthetic_profile


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    return synthetic_profile(2, grid=COARSE, seed=1)


@pytest.mark.parametrize("budget", ["70%", 600_000, "0.5MB", "500KiB"], ids=str)
def test_the_plan_keeps_its_budget(profile: Profile, budget: int | str) -> None:
    plan = search_policy(profile, budget)
    assert plan.predicted.peak_bytes <= (plan.budget_bytes or 0) < plan.baseline.peak_bytes
    assert plan.predicted == profile.predict(plan.policy)
    assert profile.noise_ratio(profile.assignment(plan.policy)) == pytest.approx(plan.bound)
    assert plan.measured is None
    assert plan.trials == 0


def test_smaller_budgets_cost_more_error(profile: Profile) -> None:
    errors = [search_policy(profile, budget).bound for budget in ("80%", "60%", "45%", "40%")]
    assert is_sorted(errors)
    assert errors[0] < errors[-1]


def test_a_budget_that_the_plain_step_keeps_compresses_nothing(profile: Profile) -> None:
    plan = search_policy(profile, profile.peak_bytes)
    assert plan.is_exact
    assert plan.policy == Policy()
    assert plan.predicted.peak_bytes == profile.peak_bytes
    assert "plain step fits the budget" in plan.won
    assert not search_policy(profile, profile.peak_bytes - 1).is_exact


def test_saved_bytes_have_a_limit_of_their_own(profile: Profile) -> None:
    free = search_policy(profile, "70%")
    bound = search_policy(profile, "70%", max_saved="20%")
    assert bound.predicted.saved_bytes <= 0.2 * profile.saved_bytes < free.predicted.saved_bytes
    assert bound.bound >= free.bound


def test_time_has_a_limit(profile: Profile) -> None:
    free = known(search_policy(profile, "90%").predicted.step_ms)
    slowdown = (free / profile.plain_ms(profile.batch_size) - 1) / 2 + 1
    bound = known(search_policy(profile, "90%", max_slowdown=slowdown).predicted.step_ms)
    assert bound <= slowdown * profile.plain_ms(profile.batch_size) * (1 + 1e-9) < free


def test_pins_are_kept(profile: Profile) -> None:
    pins = {"blocks.0.norm": LayerSettings(level=4), "loss.*": EXACT}
    policy = search_policy(profile, "60%", pins=pins).policy
    assert policy.settings("layernorm", 0, "blocks.0.norm").level == 4
    assert policy.settings("loss", 0, "loss.cross_entropy.0").exact


def test_a_batch_that_was_not_profiled_is_planned_for(profile: Profile) -> None:
    share = search_policy(profile, "60%", batch_size=20)
    assert share.budget_bytes == int(0.6 * share.baseline.peak_bytes)
    plan = search_policy(profile, profile.peak_bytes, batch_size=20)
    assert (plan.batch_size, plan.profiled_batch_size) == (20, 8)
    assert plan.baseline.peak_bytes > profile.peak_bytes >= plan.predicted.peak_bytes
    assert plan.predicted == profile.predict(plan.policy, batch_size=20)


@pytest.mark.parametrize("budget", ["banana", "0", "-1GB", "", "nan", "6XB"], ids=str)
def test_a_budget_that_is_no_amount_is_refused(profile: Profile, budget: str) -> None:
    with pytest.raises(BudgetError, match="budget"):
        search_policy(profile, budget)


@pytest.mark.parametrize(
    "bad", [{"batch_size": 0}, {"timeout": -1.0}, {"max_slowdown": 0.0}, {"trials": -1}], ids=str
)
def test_other_bad_numbers_are_refused(profile: Profile, bad: dict[str, int]) -> None:
    with pytest.raises(BudgetError):
        search_policy(profile, "60%", **bad)  # type: ignore[arg-type]


def test_an_unreachable_budget_says_what_is_reachable(profile: Profile) -> None:
    with pytest.raises(BudgetError) as caught:
        search_policy(profile, 400_000)
    text = str(caught.value)
    assert len(text.splitlines()) <= 3
    assert "static bytes are 300 kB" in text
    reachable = int(re.findall(r"\((\d+) bytes\)", text)[0])
    assert search_policy(profile, reachable).predicted.peak_bytes == reachable
    with pytest.raises(BudgetError):
        search_policy(profile, reachable - 1)


@pytest.mark.parametrize("budget", ["20%", "0.4MB", 400_000])
def test_the_least_budget_is_in_the_unit_that_was_typed(profile: Profile, budget: int | str) -> None:
    with pytest.raises(BudgetError) as caught:
        search_policy(profile, budget)
    advised = re.findall(r": budget=\"?([^\s\"]+)", str(caught.value))[0]
    assert advised.endswith("%") == str(budget).endswith("%")
    plan = search_policy(profile, advised)
    assert plan.predicted.peak_bytes <= (plan.budget_bytes or 0)
    if advised.endswith("%"):
        with pytest.raises(BudgetError):
            search_policy(profile, f"{float(advised[:-1]) - 0.1:g}%")


@pytest.mark.parametrize(("typed", "meant"), [("40", "40%"), ("0.4", "40%"), (60, "60%")])
def test_a_forgotten_percent_sign_is_noticed(profile: Profile, typed: str | int, meant: str) -> None:
    with pytest.raises(BudgetError, match=f"write it like .*{meant}"):
        search_policy(profile, typed)


def test_the_batch_size_that_would_fit_fits_and_no_larger_one_does(profile: Profile) -> None:
    budget = 700_000
    with pytest.raises(BudgetError) as caught:
        search_policy(profile, budget, batch_size=64)
    fits = int(str(caught.value).split("batch_size=")[1])
    assert 1 <= fits < 64
    assert search_policy(profile, budget, batch_size=fits).predicted.peak_bytes <= budget
    with pytest.raises(BudgetError):
        search_policy(profile, budget, batch_size=fits + 1)


def test_below_the_static_bytes_no_batch_fits(profile: Profile) -> None:
    with pytest.raises(BudgetError, match="not even a batch of one fits"):
        search_policy(profile, 1000)


def test_a_profile_of_one_size_advises_to_profile_a_smaller_one(profile: Profile) -> None:
    single = replace(profile, timeline=replace(profile.timeline, batch_sizes=(8, 8)))
    with pytest.raises(BudgetError, match="profile at a smaller batch size than 8"):
        search_policy(single, 1000)


def test_unreachable_saved_bytes_and_times_are_told_apart(profile: Profile) -> None:
    with pytest.raises(BudgetError, match=r"max-saved 10 B.*\n.*fewest saved bytes"):
        search_policy(profile, "60%", max_saved="10B")
    with pytest.raises(BudgetError, match="max-slowdown"):
        search_policy(profile, "40%", max_slowdown=1.0001)


def test_the_policy_says_what_it_was_made_for(profile: Profile) -> None:
    text = search_policy(replace(profile, model="zoo/vit.py"), "60%").policy.dumps()
    header = Policy.parse(text).header
    assert header.model == "vit"
    assert header.fingerprint == profile.layers_fingerprint
    assert header.batch == 8
    assert "gradient error" in (header.predicted or "")


@pytest.mark.parametrize(
    "content", ["{", '{"schema": "mesa-tune.plan/1"}', "[]"], ids=["cut", "empty", "list"]
)
def test_a_damaged_plan_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content, "utf-8")
    with pytest.raises(RunError, match=r"plan\.json: "):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.slow("processes")
def test_importing_search_loads_neither_optuna_nor_scipy() -> None:
    heavy = "{'optuna', 'scipy', 'pandas'}"
    program = f"import sys, mesa_tune.search; sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def network() -> nn.Module:
    hidden = (nn.ReLU(), nn.Dropout(0.2), nn.BatchNorm1d(128))
    return nn.Sequential(nn.Linear(64, 128), *hidden, nn.Linear(128, 10))


def data(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 64), torch.randint(10, (size,))


@pytest.fixture(scope="module", name="joint")
def _joint() -> JointError:
    return JointError(Workload(network, data, cross_entropy, batch_size=256))


def test_the_exact_policy_has_no_error_in_spite_of_dropout(joint: JointError) -> None:
    assert [error for error, _ in joint.errors(Policy(), [(0, 0), (1, 5)])] == [0.0, 0.0]


def test_errors_repeat_and_depend_on_draw_and_seed(joint: JointError) -> None:
    pairs = [(0, 0), (0, 1), (1, 0)]
    policy = Policy.uniform(4)
    joint.noise()
    first = joint.errors(policy, pairs)
    assert len(set(first)) == 3
    assert joint.errors(policy, pairs[::-1]) == first[::-1]
    assert JointError(joint.workload, own=joint.own).errors(policy, pairs) == first


def test_fewer_bits_err_more(joint: JointError) -> None:
    errors = [joint.errors(Policy.uniform(level), [(0, 0)])[0].error for level in (256, 16, 4)]
    assert 0 < errors[0] < errors[1] / 10 < errors[2] / 10


def test_measuring_leaves_buffers_gradients_and_generators_alone(joint: JointError) -> None:
    before = [buffer.clone() for buffer in joint.model.buffers()]
    state = torch.get_rng_state()
    joint.errors(Policy.uniform(16), [(3, 0)])
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(before, joint.model.buffers(), strict=True)
    assert all(torch.equal(kept, buffer) for kept, buffer in pairs)
    assert all(parameter.grad is None for parameter in joint.model.parameters())
