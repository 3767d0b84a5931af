"""Running ranges: Mesa's groups and averages, kept out of evaluation and recomputation, alive in copies."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mesa_tune as mt
import mesa_tune.compat.mesa as ms
from mesa_tune import notice
from mesa_tune.codecs import Memory, running
from tests.builders import Checkpointed, conversion, gradients, spec
from tests.conformance.running import relative_error

KEY = torch.tensor([5], dtype=torch.int64)


DECAY = 0.9
decaying = partial(spec, ema_decay=DECAY)


def mesas_groups(x: Tensor, groups: int) -> Tensor:
    """Mesa's reshaping, written from its description: runs of channels, or of heads for 4 dimensions."""
    axis = 1 if x.dim() == 4 else x.dim() - 1
    return torch.stack([part.reshape(-1) for part in x.chunk(groups, axis)])


@pytest.mark.parametrize("shape", [(8, 12), (4, 9, 12), (2, 6, 5, 7)], ids=["2-d", "3-d", "heads"])
@pytest.mark.parametrize("groups", [1, 3])
def test_ranges_follow_mesas_formula(shape: tuple[int, ...], groups: int) -> None:
    memory: Memory = {}
    clip_val = shift = torch.empty(0)
    for step in range(5):
        x = torch.randn(shape) * (step + 1) + step
        parts = running.encode(x, decaying(quant_groups=groups), KEY, memory)
        rows = mesas_groups(x, groups)
        low, width = rows.amin(1), rows.amax(1) - rows.amin(1)
        if step == 0:
            clip_val, shift = width, low
        else:
            clip_val = clip_val - (1 - DECAY) * (clip_val - width)
            shift = shift - (1 - DECAY) * (shift - low)
        torch.testing.assert_close(memory["clip_val"], clip_val)
        torch.testing.assert_close(memory["shift"], shift)
        assert memory["iteration"].item() == step + 1
        torch.testing.assert_close(parts[1][:, 0], shift)
        torch.testing.assert_close(parts[1][:, 1] * 255, clip_val)


def test_values_outside_take_the_nearest_end_and_never_wrap() -> None:
    memory: Memory = {}
    x = torch.linspace(-1, 1, 512).view(2, 256)
    running.encode(x, decaying(level=16), KEY, memory)
    parts = running.encode(10 * x, decaying(level=16), KEY, memory)
    decoded = running.decode(parts, x.shape, x.dtype, decaying(level=16))
    low, width = memory["shift"][:, None], memory["clip_val"][:, None]
    for outside, end in ((10 * x > low + width, low + width), (10 * x < low, low)):
        assert outside.any()
        torch.testing.assert_close(decoded[outside], end.expand(x.shape)[outside])
    inside = (10 * x > low) & (10 * x < low + width)
    assert ((decoded - 10 * x)[inside].abs() <= (width / 15).expand(x.shape)[inside] * 1.01).all()


def test_a_packed_tensor_keeps_the_ranges_it_was_packed_in() -> None:
    memory: Memory = {}
    x = torch.randn(4, 256)
    first = running.encode(x, decaying(), KEY, memory)
    before = running.decode(first, x.shape, x.dtype, decaying())
    running.encode(100 * x, decaying(), KEY, memory)
    assert torch.equal(running.decode(first, x.shape, x.dtype, decaying()), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_group_that_is_not_finite_leaves_no_trace(bad: float) -> None:
    memory: Memory = {}
    x = torch.randn(2, 256)
    running.encode(x, decaying(), KEY, memory)
    before = memory["shift"].clone(), memory["clip_val"].clone()
    x[1, 7] = bad
    parts = running.encode(2 * x, decaying(), KEY, memory)
    for now, then in zip((memory["shift"], memory["clip_val"]), before, strict=True):
        assert now[0] != then[0]
        assert now[1] == then[1]
    decoded = running.decode(parts, x.shape, x.dtype, decaying())
    assert torch.equal(decoded.isnan(), ~x.isfinite())
    step = before[1][1] / 14  # a level less, in the range known so far
    inside = (2 * x[1]).clamp(before[0][1], before[0][1] + before[1][1])[decoded[1].isfinite()]
    assert ((decoded[1][decoded[1].isfinite()] - inside).abs() <= 1.001 * step).all()


def test_a_group_that_was_never_finite_is_nan() -> None:
    x = torch.randn(2, 256)
    x[1, 7] = float("nan")
    memory: Memory = {}
    decoded = running.decode(running.encode(x, decaying(), KEY, memory), x.shape, x.dtype, decaying())
    assert decoded[0].isfinite().all()
    assert decoded[1].isnan().all()


def test_a_smaller_batch_has_the_first_groups_and_a_larger_one_more() -> None:
    memory: Memory = {}
    for rows in (4, 2, 6):
        running.encode(torch.randn(rows, 256), decaying(), KEY, memory)
    assert memory["shift"].shape == (6,)
    assert torch.isfinite(memory["shift"]).all()


def test_mesas_own_buffers_are_changed_in_place() -> None:
    buffers = {"clip_val": torch.ones(3), "shift": torch.zeros(3), "iteration": torch.zeros(1)}
    x = torch.randn(5, 12)
    running.encode(x, decaying(quant_groups=3), KEY, dict(buffers))
    rows = mesas_groups(x, 3)
    assert torch.equal(buffers["shift"], rows.amin(1))
    assert torch.equal(buffers["clip_val"], rows.amax(1) - rows.amin(1))
    assert buffers["iteration"].item() == 1


def net(reentrant: bool | None = None) -> nn.Module:
    """Two layers, the first of them checkpointed if asked for."""
    torch.manual_seed(0)
    model = nn.Sequential(Checkpointed(nn.Linear(64, 96), reentrant), nn.Linear(96, 8))
    return mt.convert(model, mt.Policy.uniform(16, ema_decay=DECAY), seed=3)


def memories(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{layer}.{place}.{name}": tensor.clone()
        for layer, places in conversion(model).memories.items()
        for place, memory in places.items()
        for name, tensor in memory.items()
    }


def step(model: nn.Module, seed: int) -> None:
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    model(x).square().mean().backward()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_only_a_forward_with_gradients_moves_the_ranges() -> None:
    model = net()
    step(model, 0)
    before = memories(model)
    assert any(name.startswith("0.part") for name in before)
    with torch.no_grad():
        model(100 * torch.randn(128, 64))
    assert same(memories(model), before)
    step(model, 1)
    assert not same(memories(model), before)


def test_a_recomputation_in_backward_moves_nothing() -> None:
    plain, checkpointed = net(), net(reentrant=False)
    for seed in range(3):
        step(plain, seed)
        step(checkpointed, seed)
    assert same(memories(plain), memories(checkpointed))
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_a_layer_that_only_runs_in_backward_is_stored_in_its_own_range() -> None:
    model = net(reentrant=True)
    for seed in range(2):
        step(model, seed)
    assert not any(name.startswith("0.part") for name in memories(model))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_carry_the_ranges_on_by_themselves(how: object) -> None:
    model = net()
    step(model, 0)
    twin = how(model)  # type: ignore[operator]
    assert same(memories(twin), memories(model))
    step(twin, 1)
    assert not same(memories(twin), memories(model))
    step(model, 1)
    assert same(memories(twin), memories(model))


def test_compiled_code_says_that_it_has_no_running_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_given", set())
    x = torch.randn(8, 256)
    compiled = torch.compile(
        lambda x, key: running.encode(x, decaying(), key), fullgraph=True, backend="aot_eager"
    )
    with pytest.warns(UserWarning, match="under torch.compile `ema_decay` has no effect"):
        data, ranges = compiled(x, KEY)
    assert all(map(torch.equal, (data, ranges), running.encode(x, decaying(), KEY)))


@pytest.mark.parametrize("steps_before", [0, 2], ids=["from the start", "after steps without"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_mesas_layer_below_a_checkpoint(reentrant: bool, steps_before: int) -> None:
    """Its buffers begin as 1 and 0, which are not ranges; and ranges of steps long ago do not fit, either."""
    plain, layer = nn.Linear(64, 32), ms.Linear(64, 32, mesa=True)
    layer.load_state_dict(plain.state_dict(), strict=False)
    for _ in range(steps_before):
        layer(torch.rand(128, 64).requires_grad_()).sum().backward()
    for step_number in range(3):
        x = (3 * torch.randn(128, 64) + step_number).requires_grad_()
        run = partial(checkpoint, use_reentrant=reentrant)
        exact, found = (gradients(each, x, run=partial(run, each)) for each in (plain, layer))
        if reentrant or step_number == steps_before == 0:  # else averages clip what has moved on
            assert relative_error(found, exact) < 1e-3
    # A reentrant checkpoint's forward has no gradients, so it moves no range.
    assert layer.iteration.item() == steps_before + (0 if reentrant else 3)
