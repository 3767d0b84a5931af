"""convert, revert and compress_saved: replaced, refused, undone, nested; odd dtypes and settings."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mesa_tune as mt
from mesa_tune import notice
from mesa_tune.conversion import entering
from mesa_tune.conversion.layers import Catalog
from mesa_tune.conversion.model import conversion_of
from mesa_tune.engine.routing import state
from mesa_tune.policy import Policy
from tests.builders import Calling, Checkpointed, Functions, ViT, gradients, known, only_hooked, policy_of
from tests.compat_measures import error
from tests.conformance.running import relative_error, saved_bytes

X = torch.randn(4, 24, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    notice._given.clear()
    yield
    assert state.frames == []
    assert not state.active


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def test_converting_again_replaces_the_policy() -> None:
    model = _mlp()
    policies = [Policy.uniform(level=level) for level in (256, 4, 256)]
    first, coarse, again = (saved_bytes(mt.convert(model, policy, min_elements=0), X) for policy in policies)
    assert first == again > coarse
    mt.revert(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_refused_policy_leaves_the_conversion_that_was_there() -> None:
    model = mt.convert(_mlp(), Policy.uniform(level=16), min_elements=0)
    before = conversion_of(model)
    with pytest.raises(mt.PolicyError, match="9"):
        mt.convert(model, policy_of("on fc:\n    by_name: 9\n    level: 4\n"))
    assert conversion_of(model) is before


def test_a_forward_of_ones_own_on_the_instance_survives() -> None:
    model = nn.Linear(64, 64)
    mine = lambda x: F.linear(x, model.weight) * 2  # noqa: E731
    model.forward = mine  # type: ignore[method-assign]
    mt.convert(model, Policy.uniform(), min_elements=0)
    assert torch.equal(model(X), mine(X))  # type: ignore[no-untyped-call]
    mt.revert(model)
    assert model.forward is mine


def test_small_tensors_stay_exact() -> None:
    plain = _mlp()
    model = mt.convert(copy.deepcopy(plain), Policy.uniform(level=2), min_elements=X.numel())
    assert relative_error(gradients(model, X), gradients(plain, X)) < 1e-12


def test_without_gradients_the_mode_is_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _mlp()
    model = mt.convert(copy.deepcopy(plain), Policy.uniform())
    monkeypatch.setattr(entering, "enter", None)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(model(X), plain(X))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_models_of_other_dtypes(dtype: torch.dtype) -> None:
    plain, x = _mlp().to(dtype), X.to(dtype)
    model = mt.convert(copy.deepcopy(plain), Policy.uniform(level=256), min_elements=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        difference = relative_error(gradients(model, x), gradients(plain, x))
    assert torch.equal(model(x), plain(x))
    if dtype == torch.float64:
        assert difference < 1e-20
        assert any("tensors of torch.float64 stay uncompressed" in str(each.message) for each in caught)
    else:
        assert 0 < difference < 1e-2
        assert not [each for each in caught if "mesa-tune" in str(each.message)]


def test_groups_that_do_not_divide_are_named() -> None:
    plain = _mlp()
    model = mt.convert(copy.deepcopy(plain), Policy.uniform(quant_groups=7), min_elements=0)
    with pytest.warns(
        UserWarning, match="'2' keeps a tensor uncompressed: quant_groups 7 does not divide 64"
    ):
        found = gradients(model, X)
    assert relative_error(found, gradients(plain, X)) < 1e-12


def test_an_argument_that_has_no_formula_is_named() -> None:
    weight = nn.Parameter(torch.randn(64))
    model = mt.convert(Calling(lambda x: F.linear(x + weight, weight)), Policy.uniform(), min_elements=0)
    with pytest.warns(UserWarning, match=r"'linear\.0' is left uncompressed"):
        model(X)


def test_a_name_that_no_layer_has_is_named_after_the_first_forward() -> None:
    model = mt.convert(
        Functions(), policy_of("on gelu:\n    by_name: gelu.7\n    level: 4\n"), min_elements=0
    )
    with pytest.warns(UserWarning, match=r"gelu\.7"):
        model(X)


def test_moved_models_and_buffers_need_no_new_conversion() -> None:
    model = mt.convert(ViT(), Policy.uniform(level=256), min_elements=0)
    tokens = X[..., :16]
    model(tokens)
    model.to(torch.bfloat16).to(torch.float32)
    assert relative_error(gradients(model, tokens), gradients(mt.revert(copy.deepcopy(model)), tokens)) < 1e-2


def _loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1]) + F.gelu(logits).mean()


def test_compress_saved_names_the_calls_of_a_loss() -> None:
    policy = policy_of("on loss:\n    by_name: loss.cross_entropy.0\n    level: 16\n")
    logits = torch.randn(64, 512).requires_grad_()
    with mt.compress_saved(policy, seed=3):
        conversion = state.frames[-1].host
        loss = _loss(logits)
    names = [name for _, _, name in conversion.catalog.layers()]  # type: ignore[attr-defined]
    assert names == ["loss.cross_entropy.0", "loss.gelu.0"]
    plain = _loss(logits)
    assert torch.equal(loss, plain)
    found, right = (torch.autograd.grad(value, logits)[0] for value in (loss, plain))
    assert 0 < error(found, right) < 0.1


def _loss_gradient(seed: int | None, policy: Policy) -> Tensor:
    """Gradient of `_loss`, computed under a policy."""
    logits = torch.linspace(-3, 3, 64 * 512).view(64, 512).requires_grad_()
    with mt.compress_saved(policy, seed=seed):
        loss = _loss(logits)
    (found,) = torch.autograd.grad(loss, logits)
    return found


@pytest.mark.parametrize(("index", "coded"), [("0", True), ("1", False)])
def test_calls_of_a_loss_are_counted_from_its_first_entry_on(index: str, coded: bool) -> None:
    found = _loss_gradient(3, policy_of(f"on gelu:\n    by_index: {index}\n    level: 4\n"))
    assert torch.equal(found, _loss_gradient(3, policy_of(""))) is not coded


def test_compress_saved_has_new_noise_at_each_entry() -> None:
    first, second, *same = (_loss_gradient(seed, Policy.uniform(level=16)) for seed in (None, None, 7, 7))
    assert not torch.equal(first, second)
    assert torch.equal(*same)


def test_a_converted_model_inside_keeps_its_policy_and_an_unconverted_one_is_loss() -> None:
    x = torch.randn(64, 24, 64)
    plain = _mlp()
    coded = mt.convert(copy.deepcopy(plain), policy_of("on fc:\n    by_index: all\n    level: 4\n"), seed=1)
    right = gradients(plain, x)
    errors = {}
    for name, model in (("converted", coded), ("plain", plain)):
        model.zero_grad()
        with mt.compress_saved(Policy.uniform(level=256)):
            loss = model(x).square().sum()
        loss.backward()
        found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        errors[name] = relative_error(found, right)
    assert errors["converted"] > 100 * errors["plain"] > 0


def _stops(outer: object) -> None:
    with mt.compress_saved(Policy.uniform(level=4)):
        assert state.frames[-1].host is not outer
        raise ValueError("stop")


def test_compress_saved_nests_and_survives_exceptions() -> None:
    logits = torch.randn(64, 512).requires_grad_()
    with mt.compress_saved(Policy.uniform(level=256)):
        outer = state.frames[-1].host
        with pytest.raises(ValueError, match="stop"):
            _stops(outer)
        assert state.frames[-1].host is outer
        _loss(logits).backward()
    assert logits.grad is not None


@pytest.mark.parametrize("part", [F.gelu, lambda x: x.sin() * x], ids=["gelu", "mul"])
def test_what_a_backward_computes_inside_compress_saved_is_no_part_of_the_loss(
    part: Callable[[Tensor], Tensor],
) -> None:
    logits = torch.linspace(-3, 3, 64 * 512).view(64, 512).requires_grad_()
    (right,) = torch.autograd.grad(part(logits).mean(), logits)
    for inside in (False, True):
        logits = logits.detach().requires_grad_()
        with mt.compress_saved(Policy.uniform(level=2), seed=1):
            loss = checkpoint(part, logits, use_reentrant=True).mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert torch.equal(known(logits.grad), right)


class _Data(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        assert state.frames == []
        return F.gelu(torch.full((64, 64), float(index)).requires_grad_()).detach()


def test_data_workers_are_not_affected() -> None:
    model = mt.convert(_mlp(), Policy.uniform(level=256), min_elements=0)
    loader = torch.utils.data.DataLoader(_Data(), batch_size=2, num_workers=1)
    for batch in loader:
        assert float(gradients(model, batch)["0.weight"].square().sum()) > 0


def test_recurrent_layers_are_named() -> None:
    model = nn.ModuleDict({"memory": nn.LSTM(8, 8)})
    with pytest.warns(UserWarning, match=r"'memory' \(LSTM\) is stored by hooks, at 8 bits"):
        mt.convert(model, Policy.uniform(level=16))


def test_batch_norms_in_one_process_need_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mt.convert(nn.Sequential(nn.SyncBatchNorm(4)), Policy.uniform(level=16))


def test_a_model_that_runs_in_backward_only_has_new_noise_in_every_step() -> None:
    layer = mt.convert(nn.Linear(64, 64), Policy.uniform(level=4), min_elements=0)
    model = Checkpointed(layer, reentrant=True)
    first, second, third = (gradients(model, X.clone().requires_grad_())["part.weight"] for _ in range(3))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


@pytest.mark.parametrize(("tag", "least"), [("gelu", 0), ("other", X.numel())], ids=["no rule", "few"])
def test_hooks_leave_tensors_exact(tag: str, least: int) -> None:
    plain = nn.Sequential(nn.Linear(64, 64), Calling(only_hooked))
    policy = policy_of(f"on {tag}:\n    by_index: all\n    level: 4\n")
    model = mt.convert(copy.deepcopy(plain), policy, min_elements=least)
    assert all(map(torch.equal, gradients(model, X).values(), gradients(plain, X).values()))


def test_calls_of_an_unknown_module_count_as_the_models_own() -> None:
    catalog = Catalog(["", "first"], [("fc", "first")], "")
    catalog.index("later.linear.0", "fc", "later")
    catalog.assign_indices(Policy.uniform())
    assert catalog.layers() == [("fc", 1, "first"), ("fc", 0, "later.linear.0")]
