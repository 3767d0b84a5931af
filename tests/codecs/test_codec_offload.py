"""Host memory: the order of copies with a copier that only notes them, and the real thing on a GPU."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.codecs import offload
from mesa_tune.codecs.offload import OffloadQueue, PendingCopy
from tests.builders import known, spec

KEY = torch.tensor([5], dtype=torch.int64)
SPEC = spec(store="offload")


class Notes:
    """A copier whose device is the host; says what it does, tensors by their first element."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def to_host(self, x: Tensor) -> Tensor:
        self.done.append(f"out {int(x[0])}")
        return x.clone()

    def to_device(self, host: Tensor) -> PendingCopy:
        number, returned = int(host[0]), host.clone()
        self.done.append(f"back {number}")

        def wait() -> Tensor:
            self.done.append(f"arrived {number}")
            return returned

        return wait


def filled(count: int) -> tuple[OffloadQueue, Notes, list[Tensor]]:
    notes = Notes()
    queue = OffloadQueue(notes)
    hosts = [queue.save(torch.full((4,), float(number))) for number in range(count)]
    notes.done.clear()
    return queue, notes, hosts


def test_each_load_prefetches_the_tensor_saved_before() -> None:
    queue, notes, hosts = filled(3)
    for number in (2, 1, 0):
        assert queue.load(hosts.pop())[0] == number
    assert notes.done == [*("back 2", "back 1", "arrived 2"), *("back 0", "arrived 1"), "arrived 0"]
    assert queue.prefetched is None


def test_freed_tensors_are_not_prefetched() -> None:
    queue, notes, hosts = filled(4)
    last = hosts.pop()
    del hosts[1:]
    gc.collect()
    queue.load(last)
    assert notes.done == ["back 3", "back 0", "arrived 3"]


def test_another_order_costs_a_copy_and_nothing_else() -> None:
    queue, notes, hosts = filled(3)
    for number in (0, 2, 0, 1):
        assert queue.load(hosts[number])[0] == number
    assert notes.done.count("back 0") == 3


def test_at_most_one_copy_is_prefetched() -> None:
    queue, notes, hosts = filled(6)
    for host in reversed(hosts):
        queue.load(host)
        begun, arrived = (sum(word.startswith(what) for word in notes.done) for what in ("back", "arrived"))
        assert begun - arrived <= 1


def test_a_new_step_forgets_the_last_one() -> None:
    queue, notes, hosts = filled(3)
    queue.load(hosts[2])
    hosts.clear()
    gc.collect()
    host = queue.save(torch.zeros(4))
    assert queue.prefetched is None
    assert notes.done == ["back 2", "back 1", "arrived 2", "out 0"]
    assert len(queue.copies) == 1
    assert known(queue.last).previous is None
    assert queue.load(host)[0] == 0


def test_strides_survive_the_way_there_and_back() -> None:
    x = torch.arange(96.0).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    parts = offload.encode(x, SPEC, KEY)
    later = offload.encode(x + 1, SPEC, KEY)
    for stored, wanted in ((later, x + 1), (parts, x)):
        found = offload.decode(stored, x.shape, x.dtype, SPEC)
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()


def test_on_a_cpu_everything_stays_and_each_layer_says_so_once() -> None:
    plain, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)), torch.randn(128, 64)
    model = mt.convert(copy.deepcopy(plain), mt.Policy.uniform(store="offload"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for one in (model, plain):
            one((x * 1).requires_grad_() * 1).square().mean().backward()
        model((x * 1).requires_grad_() * 1)
    texts = [str(each.message) for each in seen]
    assert sum("'0'" in text and "frees nothing on a CPU" in text for text in texts) == 1
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.gpu
def test_on_a_gpu_gradients_are_exact_and_memory_is_free() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024) for _ in range(8)]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(4096, 1024, device="cuda")

    def step() -> tuple[int, list[Tensor]]:
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model((x * 1).requires_grad_() * 1).square().mean()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        torch.cuda.synchronize()
        return kept, [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]

    step()
    plain, wanted = step()
    mt.convert(model, mt.Policy.uniform(store="offload"))
    step()
    kept, found = step()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    tensor = x.numel() * x.element_size()
    assert kept <= plain - 6 * tensor


@pytest.mark.gpu
def test_on_a_gpu_bits_come_back_whatever_the_streams_do() -> None:
    x = torch.randn(1 << 20, device="cuda")
    kept = []
    for number in range(20):
        y = x * number
        kept.append(offload.encode(y, SPEC, KEY))
        y.fill_(-1)
        del y
    for number in reversed(range(20)):
        assert torch.equal(offload.decode(kept.pop(), x.shape, x.dtype, SPEC), x * number)
