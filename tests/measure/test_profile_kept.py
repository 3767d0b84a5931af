"""What hooks meet and cannot encode stays, and the profile knows: whole numbers, few floats."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.profiles.profile import Profile
from tests.builders import Calling, mean, workload
from tests.step_memory import FOUR_BITS, PLAIN, Composed, measured, second_step, squares

pytestmark = pytest.mark.usefixtures("without_variants")

WIDTH, CLASSES = 64, 96


def kept_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    # No formula for both: the first saves floats, the second where each maximum was.
    logits = model(batch[0])
    highest = torch.lerp(logits, -logits, logits).cummax(-1).values
    # Cutting a column off copies the class numbers, which are born in the step.
    return (highest.gather(-1, batch[1][:, 1:, None].contiguous()) ** 2).mean()


WORK = workload(
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, CLASSES)),
    lambda n: (torch.randn(n, 20, WIDTH), torch.randint(0, CLASSES, (n, 21))),
    kept_loss,
    batch_size=16,
)


def sequences(n: int) -> Tensor:
    return torch.randn(n, 20, WIDTH)


@pytest.fixture(scope="module", name="profile")
def _profile() -> Profile:
    return mt.profile(WORK, options=())


@pytest.mark.parametrize(
    ("policy", "batch_size"), [(PLAIN, 40), (mt.Policy.uniform(level=256), 40), (FOUR_BITS, 16)], ids=str
)
def test_saved_bytes_with_whole_numbers_are_those_of_a_real_step(
    profile: Profile, policy: mt.Policy, batch_size: int
) -> None:
    found = measured(WORK, policy, batch_size)
    assert profile.predict(policy, batch_size=batch_size).saved_bytes == found.saved_bytes


def test_whole_numbers_are_freed_by_no_setting(profile: Profile) -> None:
    assert {"loss.lerp.0", "loss.cummax.0"} & set(profile.timeline.hooked)
    one_bit = profile.predict(mt.Policy.uniform(level=2))
    assert one_bit.saved_bytes > 8 * 16 * 20 * CLASSES


def recurrent(kind: Callable[..., nn.RNNBase], batch_size: int) -> mt.Workload:
    """A recurrent layer, whose kernels keep what no call takes or returns, between two linear ones."""

    def build() -> nn.Module:
        parts = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(2 * WIDTH, CLASSES)}
        layer = kind(WIDTH, 2 * WIDTH, num_layers=2, batch_first=True)
        return Composed(lambda m, x: m.last(m.recurrent(m.first(x))[0].relu()), **parts, recurrent=layer)

    return workload(build, lambda n: torch.randn(n, 6, WIDTH), mean, batch_size=batch_size)


@pytest.mark.filterwarnings("ignore:mesa-tune. .* is stored by hooks")
@pytest.mark.filterwarnings("ignore:mesa-tune. .* keeps a tensor uncompressed")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_saved_bytes_of_recurrent_layers_are_those_of_a_real_step(kind: Callable[..., nn.RNNBase]) -> None:
    work = recurrent(kind, 40)
    profile = mt.profile(work, options=())
    for policy in (PLAIN, FOUR_BITS):
        assert profile.predict(policy).saved_bytes == measured(work, policy).saved_bytes
    assert profile.notes == ()


@pytest.mark.filterwarnings("ignore:mesa-tune")
def test_small_tensors_that_hooks_meet_make_an_estimate_and_a_note() -> None:
    (note,) = mt.profile(recurrent(nn.GRU, 16), options=()).notes
    assert "'recurrent.gru.0' are estimates" in note


class _Doubled(torch.autograd.Function):
    """Somebody's own function, which saves a tensor through autograd and holds another one itself."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.other = 2 * x
        return x * ctx.other

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return 2 * (grad * ctx.other)


def _partly_reached(model: Any, x: Tensor) -> Any:
    """Linear layers around functions without a formula."""
    h = _Doubled.apply(model.first(x))  # type: ignore[no-untyped-call]
    return model.last((1 + h.tanh()).cumprod(-1).asinh())


PARTLY = workload(
    lambda: Composed(_partly_reached, first=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, CLASSES)),
    sequences,
    squares,
    batch_size=16,
)


@pytest.fixture(scope="module", name="partly")
def _partly() -> Profile:
    return mt.profile(PARTLY, options=[mt.LayerSettings(level=256)], seeds=1)


def test_what_no_policy_reaches_is_named_with_its_bytes(partly: Profile, tmp_path: Path) -> None:
    size = 16 * 20 * WIDTH * 4
    found = {(entry.function, entry.why): entry.bytes for entry in partly.exact}
    assert found["cumprod", "no formula"] == size
    assert found["_Doubled", "no formula"] == size
    assert found["unattributed", "not saved through autograd"] == size
    plain = measured(PARTLY, PLAIN)
    assert sum(layer.own_bytes for layer in partly.layers) == partly.saved_bytes == plain.saved_bytes
    partly.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").exact == partly.exact


def test_a_searched_policy_names_no_layer_that_no_policy_reaches(
    partly: Profile, recwarn: pytest.WarningsRecorder
) -> None:
    smallest = partly.predict(mt.Policy.uniform(level=256)).peak_bytes
    plan = mt.search_policy(partly, (smallest + partly.peak_bytes) // 2)
    text = plan.policy.dumps()
    assert "_Doubled" not in text
    assert "cumprod" not in text
    check = mt.verify(PARTLY, plan.policy, predicted=plan.predicted, steps=1, seeds=1)
    assert check.policy.saved_bytes == plan.predicted.saved_bytes
    assert not [one for one in recwarn if "no layer" in str(one.message)]


def _after(function: Callable[[Any, Tensor, Tensor], Any], **parts: nn.Module) -> Callable[[], nn.Module]:
    """Build a linear layer, and a function of the model, its input and the layer's output."""
    return lambda: Composed(
        lambda m, x: function(m, x, m.first(x)).sum(), first=nn.Linear(WIDTH, WIDTH), **copy.deepcopy(parts)
    )


def _weighted(_: Any, x: Tensor, y: Tensor) -> Tensor:
    """Attention weights, a small tensor that a product keeps beside a large one."""
    return (y[..., :8] @ y[..., :8].mT).softmax(-1) @ y


def _first_tokens(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Functions that keep masks, of few tokens, which lie in the tensor of all of them."""
    kept = torch.maximum(y[:, 0], y[:, 1]), y[:, 2].relu(), torch.where(x[:, 0] > 0, y[:, 4], 0)
    return torch.cat([*kept, model.dropout(y[:, 3])])


def _widened(kind: Callable[..., nn.Module]) -> nn.Module:
    """A function in place on the output of a layer with little input, which PyTorch returns as a view."""
    layers = nn.Sequential(nn.Linear(2, 8 * WIDTH), kind(inplace=True), nn.Linear(8 * WIDTH, 4))
    return Composed(lambda m, x: m.layers(x[..., :2]).sum(), layers=layers)


DROPOUT = nn.Dropout(0.5)
TWICE = _after(lambda m, x, y: m.dropout(y).sum() + m.dropout(y[:, :2]).sum(), dropout=DROPOUT)


def _heads(queries: int, tokens: int) -> nn.Module:
    """Attention of `queries` heads to one, all of them parts of one tensor."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).split([16 * queries, 16, 16], dim=-1)
        q, k, v = (each.unflatten(-1, (-1, 16)).transpose(1, 2) for each in (q, k, v))
        parts = zip(*(each.split(tokens, dim=2) for each in (q, k, v)), strict=True)
        attended = [F.scaled_dot_product_attention(q, k, v, enable_gqa=True) for q, k, v in parts]
        return torch.cat(attended, 2).sum()

    return Composed(forward, qkv=nn.Linear(WIDTH, 16 * (queries + 2)))


@pytest.mark.parametrize(
    ("build", "batch_size"),
    [
        pytest.param(TWICE, 16, id="mixed calls"),
        pytest.param(TWICE, 32, id="mixed calls at the limit"),
        pytest.param(_after(lambda m, x, y: y.max(-1).values), 16, id="indices"),  # few rows
        pytest.param(_after(_weighted), 8, id="small weights"),
        pytest.param(_after(_weighted), 16, id="weights"),
        pytest.param(_after(lambda m, x, y: m.norm(y[:, 0]), norm=nn.LayerNorm(WIDTH)), 16, id="scraps"),
        pytest.param(_after(_first_tokens, dropout=DROPOUT), 32, id="masks of scraps"),
        pytest.param(lambda: _widened(nn.ReLU), 16, id="gate in place"),
        pytest.param(lambda: _widened(nn.SiLU), 16, id="curve in place"),
        pytest.param(lambda: _widened(nn.Dropout), 16, id="dropout in place"),
        pytest.param(lambda: _heads(4, 20), 8, id="small keys"),
        pytest.param(lambda: _heads(4, 20), 32, id="keys"),
        pytest.param(lambda: _heads(4, 5), 16, id="small parts"),
        pytest.param(lambda: _heads(4, 5), 8, id="smaller parts"),
    ],
)
def test_bytes_of_small_tensors_are_those_of_a_step(build: Callable[[], nn.Module], batch_size: int) -> None:
    work = workload(build, sequences, lambda model, x: model(x), batch_size=batch_size)
    found = measured(work, FOUR_BITS)
    assert mt.profile(work, options=()).predict(FOUR_BITS).saved_bytes == found.saved_bytes


@pytest.mark.parametrize("width", [32, 48, 256])
def test_saved_bytes_of_norms_by_hand_are_those_of_a_real_step(width: int) -> None:
    def norm_by_hand(x: Tensor) -> Tensor:
        """An RMS norm in the user's own words, whose groups end where its rows do."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), Calling(norm_by_hand), nn.Linear(width, width))

    work = workload(build, lambda n: torch.randn(n, 20, width), squares, batch_size=16)
    profile = mt.profile(work, options=())
    for group_size in (256, 64, 1024):
        policy = mt.Policy.uniform(level=16, group_size=group_size)
        assert profile.predict(policy).saved_bytes == measured(work, policy).saved_bytes, group_size


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_a_small_layer_keeps_the_cast_copy_of_its_weight_only_where_it_is_exact(autocast: str | None) -> None:
    """A classifier of few samples: its input is too small to compress, its weight is not."""

    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1000))

    def batch(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 200, WIDTH), torch.randint(1000, (n,))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(model, nn.Sequential)
        return F.cross_entropy(model[2](model[:2](batch[0]).mean(1)).float(), batch[1])

    work = workload(made, batch, loss, batch_size=4, autocast=autocast)
    profile = mt.profile(work, options=[])
    for policy in (PLAIN, FOUR_BITS):
        found = second_step(work, policy).saved_bytes
        assert profile.predict(policy).saved_bytes == pytest.approx(found, abs=8)  # a bit per row
