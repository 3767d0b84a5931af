"""The batches that a training script has: one, or an iterable of them, such as a DataLoader.

What is hard: a profile asks for many batches, of two sizes, in any order, and for each more than once. So
those of an iterable are taken in order and saved. The gradient noise needs different batches: of just one,
further ones draw samples with replacement (a bootstrap), and their gradients vary as those of real batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mesa_tune.errors import WorkloadError
from mesa_tune.workload.batches import batch_size, is_container, select, tensors_of, to_device

MOST_BATCHES, MOST_BYTES = 64, 2 << 30
"""At most so many batches of an iterable are saved, and at most so many bytes of them in host memory."""
FEW_BATCHES = 16
"""With fewer batches, notes say so: the gradient noise is measured on at least so many steps."""


class GivenBatches:
    """Batches by number and number of samples, made from one batch or an iterable of batches.

    A tensor, mapping, list, tuple or dataclass is one batch. Of an iterable, batches with fewer samples than
    the first are left out, and numbers beyond the last batch begin again at the first. `size`: samples of the
    first. Raise WorkloadError for an iterable without a batch, or a batch without a tensor.
    """

    def __init__(self, given: Any) -> None:
        is_one = isinstance(given, Tensor) or is_container(given) or not isinstance(given, Iterable)
        self._saved: list[Any] = [given] if is_one else []
        self._bytes = 0
        self._source = None if is_one else given
        self._rest: Iterator[Any] | None = None
        self.size = batch_size(given) if is_one else 0
        if not is_one:
            self._take()

    def __call__(self, count: int) -> Any:
        """Return the first batch with `count` samples."""
        return self.numbered(0, count)

    def numbered(self, number: int, count: int) -> Any:
        """Return a copy of batch `number` with `count` samples: its first, or from the first again."""
        while number >= len(self._saved) and self._source is not None:
            self._take()
        known = len(self._saved)
        batch = self._saved[number % known]
        size = batch_size(batch)
        again = known == 1 and number > 0
        index = torch.randint(size, (count,)) if again else torch.arange(count) % size
        return select(batch, index, size)

    @property
    def notes(self) -> tuple[str, ...]:
        """A note if there were few batches."""
        known = len(self._saved)
        if known >= FEW_BATCHES or self._source is not None:
            return ()
        if known == 1:
            how = "gradient errors and noise are measured on samples drawn from it with replacement"
            return (f"one batch of {self.size} samples was given: {how}",)
        return (
            f"{known} batches were taken: gradient errors and noise are measured on these again and again",
        )

    def _take(self) -> None:
        """Save the next batch of the iterable that has enough samples; note if there is none."""
        if self._rest is None:
            self._rest = iter(self._source or ())
        for batch in self._rest:
            size = batch_size(batch)
            self.size = self.size or size
            if size >= self.size:
                self._save(batch)
                return
        self.close()
        if not self._saved:
            raise WorkloadError(
                "batch: the iterable has no batch\ngive one batch, or one that is not exhausted"
            )

    def _save(self, batch: Any) -> None:
        size = batch_size(batch)
        copied = select(batch, torch.arange(size), size)
        self._saved.append(to_device(copied, "cpu"))
        self._bytes += sum(tensor.nbytes for tensor in tensors_of(self._saved[-1]))
        if len(self._saved) >= MOST_BATCHES or self._bytes >= MOST_BYTES:
            self.close()

    def close(self) -> None:
        """Take no further batch: end the workers of a DataLoader."""
        self._rest = self._source = None


@contextmanager
def preserved_generators(given: Any) -> Iterator[None]:
    """Restore the own random generators of a DataLoader, of its sampler and batch sampler, after the body."""
    batch_sampler = getattr(given, "batch_sampler", None)
    owners = (given, getattr(given, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    states = [(each, each.get_state()) for each in generators if isinstance(each, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def drawn(batch: Callable[[int], Any], count: int, draw: int) -> Any:
    """Return a batch of `count` samples from the user's function, or the `draw`-th of given batches."""
    return batch.numbered(draw, count) if isinstance(batch, GivenBatches) else batch(count)
