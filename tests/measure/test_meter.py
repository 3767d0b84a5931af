"""The meter against memory that can be counted by hand."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mesa_tune.measure.memory.meter import Meter, StepMemory, bytes_of, measure_step, tensors_in
from tests.step_memory import squares

KB = 1024


def floats(count: int = 256) -> Tensor:
    return torch.zeros(count)


def net() -> nn.Module:
    """Two layers whose kept tensors are known: GELU keeps its input, the second layer GELU's output."""
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))


def measured(model: nn.Module, batch: Any, loss: Any = squares, momentum: float = 0.0) -> StepMemory:
    return measure_step(model, batch, loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))


class TestMeter:
    def test_counts_births_and_deaths(self) -> None:
        with Meter() as meter:
            a, b = floats(), floats()
            assert meter.live_bytes == 2 * KB
            del a
            assert meter.live_bytes == KB
            assert meter.tensor_peak == 2 * KB
        del b  # after the meter was left
        assert meter.live_bytes == 0

    def test_counts_memory_that_is_freed_and_taken_again_under_a_living_tensor(self) -> None:
        old = floats()
        with Meter() as meter:
            new = floats()
            new.untyped_storage().resize_(0)
            assert meter.live_bytes == meter.live_since(0) == 0
            old.untyped_storage().resize_(0)
            assert meter.live_bytes == -KB
            new.untyped_storage().resize_(2 * KB)
            new.untyped_storage().resize_(3 * KB)
            old.untyped_storage().resize_(KB)
            assert meter.live_bytes == meter.tensor_peak == 3 * KB
            del new
            assert meter.live_bytes == 0
        old.untyped_storage().resize_(0)
        assert meter.live_bytes == 0

    def test_counts_a_storage_once_however_many_views(self) -> None:
        with Meter() as meter:
            a = floats()
            views = [a.view(16, 16), a[:10], a.t()]
            del a
            assert meter.live_bytes == KB
            views.clear()
            assert meter.live_bytes == 0

    def test_leaves_out_what_is_older(self) -> None:
        old = floats()
        with Meter() as meter:
            view = old.view(16, 16)
            view.add_(1)
            assert meter.live_bytes == 0
            assert (view + 1).numel() == 256
        assert meter.tensor_peak == KB

    def test_survives_the_reuse_of_addresses(self) -> None:
        seen = set()
        with Meter() as meter:
            for _ in range(200):
                x = torch.ones(4096)
                seen.add(x.untyped_storage()._cdata)
                del x
                assert meter.live_bytes == 0
            assert meter.tensor_peak == 4 * 4096
        assert len(seen) < 200, "no address was reused, so this test tests nothing"

    def test_sees_what_autograd_keeps_without_a_name(self) -> None:
        x = torch.ones(256, requires_grad=True)
        with Meter() as meter:
            y = (x * 2).sin()  # sin keeps x * 2
            assert meter.live_bytes == 2 * KB
            y.sum().backward()
            del y
            x.grad = None
            assert meter.live_bytes == 0

    def test_sees_the_backward(self) -> None:
        x = torch.ones(256, requires_grad=True)
        y = x.sin().cos().sum()
        with Meter() as meter:
            y.backward()
        assert meter.live_bytes == KB, "the gradient of x"
        assert meter.tensor_peak >= 2 * KB

    def test_follows_a_storage_that_grows(self) -> None:
        with Meter() as meter:
            x = torch.empty(0)
            torch.cat([floats(), floats()], out=x)
            assert meter.live_bytes == 2 * KB

    def test_live_since_a_mark_without_some(self) -> None:
        with Meter() as meter:
            before = floats()
            mark = meter.mark()
            a, b = floats(), floats(512)
            assert meter.live_since(mark) == 3 * KB
            assert meter.live_since(mark, without=[a.view(2, 128)]) == 2 * KB
            assert meter.live_since(0) == meter.live_bytes == 4 * KB
            assert meter.counted_bytes([before, b, a[:2]]) == 4 * KB
        assert meter.counted_bytes([b, torch.zeros(())]) == 2 * KB

    def test_high_water_starts_again(self) -> None:
        with Meter() as meter:
            floats(10_000)
            a = floats()
            meter.reset_peak()
            assert meter.tensor_peak == KB == bytes_of([a])

    def test_counts_the_parts_of_sparse_tensors(self) -> None:
        weight = torch.zeros(1000, 64, requires_grad=True)
        with Meter() as meter:
            F.embedding(torch.tensor([1, 2]), weight, sparse=True).sum().backward()
            gc.collect()
            assert 2 * 64 * 4 <= meter.live_bytes < 1000 * 64 * 4


class TestStep:
    def test_saved_are_the_two_hidden_tensors(self) -> None:
        memory = measured(net(), torch.randn(8, 32))
        assert memory.saved_bytes == 2 * 8 * 64 * 4 + 8 * 16 * 4  # and the output

    def test_static_counts_weights_buffers_batch_and_momentum(self) -> None:
        model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64))
        weights, buffers, batch = 4 * (32 * 64 + 64 + 2 * 64), 4 * 2 * 64 + 8, 8 * 32 * 4
        assert measured(model, torch.randn(8, 32)).static_bytes == weights + buffers + batch
        assert measured(model, torch.randn(8, 32), momentum=0.9).static_bytes == 2 * weights + buffers + batch

    def test_peak_holds_static_gradients_and_saved(self) -> None:
        memory = measured(net(), torch.randn(256, 32), momentum=0.9)
        assert memory.saved_bytes < memory.peak_bytes - memory.static_bytes < 3 * memory.saved_bytes

    def test_peak_of_a_step_counted_by_hand(self) -> None:
        model = nn.Linear(1024, 1, bias=False)
        memory = measured(model, torch.ones(1, 1024), lambda model, batch: model(batch).sum())
        assert (memory.static_bytes, memory.saved_bytes) == (2 * 4 * KB, 0)
        # The weight's gradient, as large as the weight, beside a few scalars.
        assert 0 <= memory.peak_bytes - 3 * 4 * KB <= 64

    def test_a_pool_that_survives_steps_counts_as_saved(self) -> None:
        pool: list[Tensor] = []

        def loss(model: nn.Module, batch: Tensor) -> Any:
            if not pool:
                pool.append(floats(1000))
            return squares(model, batch)

        plain = measured(net(), torch.randn(8, 32)).saved_bytes
        assert measured(net(), torch.randn(8, 32), loss).saved_bytes == plain + 4000

    def test_checkpointing_saves_less_and_peaks_lower(self) -> None:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            x = batch
            for block in model.children():
                x = checkpoint(block, x, use_reentrant=False)
            return x.square().mean()

        plain, less = measured(model, torch.randn(512, 64)), measured(model, torch.randn(512, 64), loss)
        assert less.saved_bytes < 0.6 * plain.saved_bytes
        assert less.peak_bytes < plain.peak_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_peak_leaves_out_what_others_hold() -> None:
    model, batch = net().cuda(), torch.randn(4096, 32, device="cuda")
    alone = measured(model, batch)
    other = torch.zeros(10_000_000, device="cuda")
    assert measured(model, batch).peak_bytes == pytest.approx(alone.peak_bytes, rel=0.01)
    assert other.numel() == 10_000_000


def test_tensors_in_finds_them_anywhere() -> None:
    class Batch:
        def __init__(self) -> None:
            self.x = {"a": (floats(), [floats(2)])}
            self.me = self

    assert sorted(tensor.numel() for tensor in tensors_in([Batch(), None, "text"])) == [2, 256]
