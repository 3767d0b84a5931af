"""Measure a policy's gradient error, ‖ĝ − g‖² / ‖g‖² over all trained parameters, and the batches' noise.

What is hard: differences must come from the policy alone. The exact and the compressed gradient need the same
batch, dropout masks and buffers; two policies need the same batches and rounding seeds. So a measurement is
identified by a pair (draw of the batch, rounding seed), gives the same number whenever it is repeated, and
leaves buffers and random generators unchanged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mesa_tune.conversion import compress_saved, convert, revert
from mesa_tune.conversion.model import conversion_of
from mesa_tune.errors import WorkloadError
from mesa_tune.notice import Progress, unshown
from mesa_tune.policy import Policy
from mesa_tune.profiler.errors.noise import Noise
from mesa_tune.profiler.errors.recorded import as_real
from mesa_tune.profiler.errors.step_gradient import step_gradient, undisturbed
from mesa_tune.workload.checkpoints import with_checkpoints
from mesa_tune.workload.session import RawConversion, session
from mesa_tune.workload.user_code import mixed_seed
from mesa_tune.workload.workload import Workload

Pair = tuple[int, int]
"""Number of the batch's draw, and rounding seed."""
Gradient = list[Tensor | None]

_CACHED_DRAWS = 4
_MANY = 0.05
"""Share of the trained elements of which a note tells that their gradients are zero."""
_PIECE = 1 << 20
_SEEDS_PER_DRAW = 1_000_003
_SEEDS_PER_BATCH = 1_000_000_007
NOISE_STEPS, FEWEST_NOISE_STEPS, _NOISE_ERROR = 64, 16, 0.05
"""At most and at least so many steps show the noise: until the standard error of the mean ‖g_b‖² is this
share of it. The noise, and ratios to it, are then known about as well.
"""


class JointError:
    """The relative squared error of the whole gradient under a policy, on a workload's batches.

    `checkpointed`: compute exact gradients with checkpoints, where the plain step does not fit in memory.
    """

    def __init__(
        self, workload: Workload, model: nn.Module | None = None, *, checkpointed: bool = False
    ) -> None:
        self.workload = workload
        self.checkpointed = checkpointed
        self.model = workload.build() if model is None else model
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._exact: dict[int, tuple[list[Any], Gradient]] = {}
        self._norms: dict[int, float] = {}
        self._without_gradient: list[int] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """A note if many trained weights had gradients of exactly zero in all steps of `noise`.

        So it is before the first step of weights behind others that are zero: LoRA's A behind its B.
        """
        sizes = [parameter.numel() for parameter in self.parameters]
        share = sum(sizes[index] for index in self._without_gradient) / max(1, sum(sizes))
        if share < _MANY:
            return ()
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        first = names[self._without_gradient[0]]
        note = (
            f"{share:.0%} of the trained weights, such as {first!r}, have gradients of "
            "exactly zero here: errors in these are not seen, and a policy may err more once they train. "
            "Profile a model that has taken its first steps"
        )
        return (note,)

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[float]:
        """Return the gradient error of `policy` at each pair.

        Raise WorkloadError if the exact gradient is zero or not finite, or the workload's functions fail.
        """
        return [self._error(policy, draw, seed) for draw, seed in pairs]

    def norms(self, draws: Sequence[int]) -> list[float]:
        """Return ‖g‖² of the exact gradients. Raise WorkloadError as `errors` does."""
        for draw in draws:
            if draw not in self._norms:
                self._exact_at(draw)
        return [self._norms[draw] for draw in draws]

    def _error(self, policy: Policy, draw: int, seed: int) -> float:
        exact, changed = self.gradients(policy, draw, seed)
        error = squared(changed, exact) / self._norms[draw]
        return error if math.isfinite(error) else math.inf

    def gradients(self, policy: Policy, draw: int, seed: int) -> tuple[Gradient, Gradient]:
        """Return the exact gradient of a step, and that under `policy`."""
        batches, exact = self._exact_at(draw)
        return exact, self._compressed(policy, batches, draw, seed)

    def _compressed(self, policy: Policy, batches: Sequence[Any], draw: int, seed: int) -> Gradient:
        rounding_seed = draw * _SEEDS_PER_DRAW + seed
        convert(self.model, policy, seed=rounding_seed)
        try:
            if _needs_first_step(policy):
                self._take_first_step(policy, batches[0], draw)
            return self._gradient(batches, draw, policy, rounding_seed)
        finally:
            revert(self.model)

    def _take_first_step(self, policy: Policy, batch: Any, draw: int) -> None:
        """Run one forward, which shows the indices of function calls and which layers derive from which.

        Run its backward, too, where parts of the forward run again in it.
        """
        if self.workload.step is not None:
            self._gradient([batch], draw, policy, 0)
            return
        with self._undisturbed(draw), compress_saved(policy, seed=0):
            loss = self.workload.compute_loss(self.model, batch)
            conversion = conversion_of(self.model)
            if conversion is not None and conversion.waits:
                loss.backward()

    def _exact_at(self, draw: int) -> tuple[list[Any], Gradient]:
        """Return a step's batches and its exact gradient, whose squared norm is kept; some are cached."""
        if draw not in self._exact:
            while len(self._exact) >= _CACHED_DRAWS:
                self._exact.popitem()  # the latest, because pairs come in the same order again
            batches = self._batches(draw)
            gradient = self._gradient(batches, draw, None, 0)
            size = squared(gradient)
            if not 0 < size < float("inf"):
                raise WorkloadError(
                    f"the gradient on batch {draw} has the squared norm {size:g}: no error relates to it\n"
                    "give the model weights and batches from which training can go on"
                )
            self._norms[draw] = size
            self._exact[draw] = batches, gradient
        return self._exact[draw]

    def floor(self, draw: int = 0) -> float:
        """Return the error of a step in which all formulas run and nothing is compressed.

        It comes from kernels that are not deterministic, and from formulas that compute in another order.
        """
        batches, exact = self._exact_at(draw)
        with session(self.model, Policy.parse(""), kind=RawConversion) as running:
            gradient = self._gradient_of(batches, draw, lambda _: running.forward())
            return squared(gradient, exact) / self._norms[draw]

    def noise(
        self,
        policy: Policy | None = None,
        *,
        first: int = 0,
        fewest: int = 1,
        most: int = NOISE_STEPS,
        show: Progress = unshown,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Noise:
        """Return the noise of steps from the `first` draw on; only the sum of their gradients is held.

        On every second one the error of `policy` is measured, too, for `Noise.measured`. `goes_on`: asked
        whether there is time for more than `fewest` steps, and more than one.
        """
        total: Gradient = [None] * len(self.parameters)
        sizes: list[float] = []
        errors: list[float] = []
        most = max(fewest, most)
        for draw in range(first, first + most):
            show(f"gradient noise, batch {len(sizes) + 1} of at most {most}", len(sizes) / most)
            gradient = self._exact_gradient(draw)
            sizes.append(squared(gradient))
            if policy is not None and len(sizes) % 2 == 0:
                errors.append(squared(self._compressed(policy, self._batches(draw), draw, 0), gradient))
            for index, (sum_, part) in enumerate(zip(total, gradient, strict=True)):
                if part is not None:  # the clone, because the gradient may be cached
                    total[index] = part.clone() if sum_ is None else sum_.add_(part)
            del gradient  # before the next one takes memory
            if len(sizes) >= max(fewest, 2) and (_is_known(sizes) or not goes_on()):
                break
        self._without_gradient = [index for index, sum_ in enumerate(total) if _is_zero(sum_)]
        mean = statistics.fmean(sizes)
        if not 0 < mean < math.inf:
            return Noise(0.0, 1.0)
        scattered = sum(sizes) - squared(total) / len(sizes)
        norms = tuple([size / mean for size in sizes])
        relative = max(0.0, scattered / (len(sizes) - 1)) / mean
        measured = statistics.fmean(errors) / mean if errors else None
        return Noise(relative, statistics.fmean(norms), norms, measured)

    def _batches(self, draw: int) -> list[Any]:
        """Return the micro-batches of one step."""
        count = self.workload.accumulation
        return [self.workload.make_batch(draw=draw * count + index) for index in range(count)]

    def _exact_gradient(self, draw: int) -> Gradient:
        return (
            self._exact[draw][1]
            if draw in self._exact
            else self._gradient(self._batches(draw), draw, None, 0)
        )

    def _gradient(
        self, batches: Sequence[Any], draw: int, policy: Policy | None, rounding_seed: int
    ) -> Gradient:
        """Return the sum of the gradients of all backwards of a step."""
        return self._gradient_of(
            batches, draw, lambda index: self._storing(policy, rounding_seed + index * _SEEDS_PER_BATCH)
        )

    def _gradient_of(
        self, batches: Sequence[Any], draw: int, forward: Callable[[int], AbstractContextManager[Any]]
    ) -> Gradient:
        with self._undisturbed(draw):
            return step_gradient(self.workload, self.model, self.parameters, batches, forward)

    def _storing(self, policy: Policy | None, seed: int) -> AbstractContextManager[Any]:
        """Return the context of a forward under `policy`, or of an exact one."""
        return self.exact_forward() if policy is None else compress_saved(policy, seed=seed)

    def exact_forward(self) -> AbstractContextManager[Any]:
        """Return the context of an exact forward."""
        return with_checkpoints(self.model) if self.checkpointed else nullcontext()

    def _undisturbed(self, draw: int) -> AbstractContextManager[None]:
        """Return a context with random states that depend on `draw`, after which nothing has changed.

        The user's own step may also change parameters, such as averages of others.
        """
        seed, device = mixed_seed(self.workload.seed, -1 - draw), self.workload.device
        return undisturbed(self.model, seed, device, parameters=self.workload.step is not None)


def _is_zero(sum_: Tensor | None) -> bool:
    return sum_ is not None and sum_.layout is torch.strided and not sum_.any()


def _is_known(sizes: Sequence[float]) -> bool:
    """Return whether so many ‖g_b‖² show their mean; asked after every eighth of them."""
    if len(sizes) < FEWEST_NOISE_STEPS or len(sizes) % 8:
        return False
    return statistics.stdev(sizes) <= _NOISE_ERROR * math.sqrt(len(sizes)) * statistics.fmean(sizes)


def squared(gradient: Sequence[Tensor | None], other: Sequence[Tensor | None] | None = None) -> float:
    """Return ‖gradient − other‖² over all parameters; a gradient that is None counts as zero."""
    total = 0.0
    for pair in zip(gradient, [None] * len(gradient) if other is None else other, strict=True):
        tensors = [as_real(tensor) for tensor in pair if tensor is not None]
        for parts in zip(*_pieces(tensors), strict=True):
            wide = [part.double() for part in parts]
            difference = wide[0] - wide[1] if len(wide) == 2 else wide[0]
            total += float(difference.square().sum())
    return total


def _pieces(tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Return the tensors in equal pieces: copies in 64 bits of a large one would take much memory."""
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return [[tensor] for tensor in tensors]
    return [tensor.reshape(-1).split(_PIECE) for tensor in tensors]


def representatives(norms: Sequence[float], count: int) -> list[int]:
    """Return the positions of `count` batches that stand for all, in order; `norms`: their ‖g_b‖².

    Where few batches have far larger gradients than the others, their errors are larger, too, and are most
    of the mean error. So the batches are sorted by their norms and divided into equal parts, and of each part
    the one nearest to its mean is taken (a stratified sample); of the last part one that is at least its
    mean, because a few large ones may be nearest to none.
    """
    values = np.asarray(norms)
    *parts, last = np.array_split(np.argsort(values, kind="stable"), min(count, len(values)))
    chosen = [part[np.abs(values[part] - values[part].mean()).argmin()] for part in parts]
    chosen.append(next(position for position in last if values[position] >= values[last].mean() * (1 - 1e-9)))
    return sorted(map(int, chosen))


def _needs_first_step(policy: Policy) -> bool:
    """Return whether the first step of a converted model stores layers differently from later steps.

    This is so if rules name layers by index alone, or if layers derive.
    """
    by_index = any(rule.indices != "all" and rule.names is None for rule in policy.rules)
    return by_index or any(dict(rule.keys).get("store") == "derive" for rule in policy.rules)
