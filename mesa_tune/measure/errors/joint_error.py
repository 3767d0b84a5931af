"""Measure a policy's gradient error, beside the gradient and beside the noise of the batches.

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
from mesa_tune.conversion.python_state.watch import Watch
from mesa_tune.errors import WorkloadError
from mesa_tune.measure.errors.noise import Noise, Parts, noise_of
from mesa_tune.measure.errors.step_gradient import step_gradient, undisturbed
from mesa_tune.notice import Progress, unshown
from mesa_tune.policy import Policy
from mesa_tune.profiles.own_noise import Floats, GradientError, OwnNoise, Pair
from mesa_tune.units import counted
from mesa_tune.workload.checkpoints import with_checkpoints
from mesa_tune.workload.session import RawConversion, session
from mesa_tune.workload.user_code import mixed_seed, seeded
from mesa_tune.workload.workload import Workload

Gradient = list[Tensor | None]

_CACHED_DRAWS = 4
MOST_FIRST_STEPS = 30
_FIRST_STEPS = 3_000_000
"""The first draw of the steps that are taken before anything is measured."""
_LOOKS = 3
_SEEDS_PER_DRAW = 1_000_003
_SEEDS_PER_BATCH = 1_000_000_007
NOISE_STEPS, FEWEST_NOISE_STEPS, _NOISE_ERROR = 64, 16, 0.05
"""At most and at least so many steps show the noise: until the standard error of the mean ‖g_b‖² is this
share of it. The noise, and ratios to it, are then known about as well.
"""


class JointError:
    """The error of the whole gradient under a policy, on a workload's batches.

    `own`: the parameters' own noise, where it is known; `noise` measures it. `checkpointed`: compute exact
    gradients with checkpoints, where the plain step does not fit in memory.
    """

    def __init__(
        self,
        workload: Workload,
        model: nn.Module | None = None,
        *,
        own: OwnNoise | None = None,
        checkpointed: bool = False,
    ) -> None:
        self.workload = workload
        self.checkpointed = checkpointed
        self.model = workload.build() if model is None else model
        self._watch = Watch(self.model)
        self.parts = Parts(self.model)
        self.parameters = self.parts.parameters
        self.own = own
        self._exact: dict[int, tuple[list[Any], Gradient]] = {}
        self._norms: dict[int, float] = {}
        self.first_steps = 0
        self.notes: tuple[str, ...] = ()

    def take_first_steps(self, first: int = 0) -> None:
        """Train until no weight has a gradient of exactly zero, for `MOST_FIRST_STEPS` at most.

        Behind weights that are zero, such as LoRA's B, gradients are zero before the first step, and errors
        in them are not seen. `first`: the draw on which gradients are looked at. `Workload.steps_before` is
        another number of steps. They take batches that nothing else uses, and the user's optimizer, at the
        learning rate that it has without a schedule.
        """
        most = self.workload.steps_before
        silent = [] if most == 0 else self._silent(first)
        if not most and not silent:
            return
        optimizer = self.workload.make_optimizer(self.model)
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"])
        stepper, count = self.workload.stepper(optimizer), self.workload.accumulation
        for number in range(MOST_FIRST_STEPS if most is None else most):
            draw = _FIRST_STEPS + number
            with seeded(mixed_seed(self.workload.seed, -1 - draw), self.workload.device):
                stepper.run(self.model, self.workload.make_batch(draw=draw * count), self.exact_forward)
            self._exact.clear()
            self._norms.clear()
            self.first_steps += 1
            if most is None and not self._silent(first):
                break
        why = f": before them, {silent[0]} has a gradient of exactly zero" if silent else ""
        self.notes = (f"{counted(self.first_steps, 'training step')} taken before errors are measured{why}",)

    def _silent(self, first: int) -> list[str]:
        """Return the parameters whose gradients are zero, but computed, on each of some batches."""
        silent = self.parts.whole_names
        for draw in range(first, first + _LOOKS):
            _, gradient = self.exact_at(draw)
            zero = {
                name for name, part in zip(self.parts.whole_names, gradient, strict=True) if _is_zero(part)
            }
            silent = [name for name in silent if name in zero]
            if not silent:
                break
        return silent

    def errors(self, policy: Policy, pairs: Sequence[Pair]) -> list[GradientError]:
        """Return the error of `policy` at each pair, infinite where the gradient is not finite.

        Raise WorkloadError if the exact gradient is zero or not finite, or the workload's functions fail.
        """
        return [self._error(policy, draw, seed) for draw, seed in pairs]

    def _error(self, policy: Policy, draw: int, seed: int) -> GradientError:
        return self.relative(self.squares(policy, draw, seed), draw)

    def squares(self, policy: Policy, draw: int, seed: int) -> Floats:
        """Return ‖ĝ − g‖² of each part of the parameters."""
        exact, changed = self.gradients(policy, draw, seed)
        return self.parts.squares(changed, exact)

    def relative(self, squares: Floats, draw: int) -> GradientError:
        """Return the error of a gradient on a batch; `squares`: ‖ĝ − g‖² of each part."""
        if not np.isfinite(squares).all():
            return GradientError(math.inf, math.inf)
        ratio = math.nan if self.own is None else self.own.ratio(squares)
        return GradientError(float(squares.sum()) / self._norms[draw], ratio)

    def gradients(self, policy: Policy, draw: int, seed: int) -> tuple[Gradient, Gradient]:
        """Return the exact gradient of a step, and that under `policy`."""
        batches, exact = self.exact_at(draw)
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

    def exact_at(self, draw: int) -> tuple[list[Any], Gradient]:
        """Return a step's batches and its exact gradient, whose squared norm is kept; some are cached."""
        if draw not in self._exact:
            while len(self._exact) >= _CACHED_DRAWS:
                self._exact.popitem()  # the latest, because pairs come in the same order again
            batches = self._batches(draw)
            gradient = self.gradient(batches, draw)
            size = float(self.parts.squares(gradient).sum())
            if size == 0:
                raise self.workload.step_error(
                    "gives every parameter the gradient zero, so no error can be measured against it",
                    "check that the loss depends on the parameters, or give the model a first training step",
                )
            if not 0 < size < float("inf"):
                raise WorkloadError(
                    f"the gradient on batch {draw} has the squared norm {size:g}: no error relates to it\n"
                    "give the model weights and batches from which training can go on"
                )
            self._norms[draw] = size
            self._exact[draw] = batches, gradient
        return self._exact[draw]

    def floor(self, draw: int = 0) -> GradientError:
        """Return the error of a step in which all formulas run and nothing is compressed.

        It comes from kernels that are not deterministic, and from formulas that compute in another order.
        """
        batches, exact = self.exact_at(draw)
        with session(self.model, Policy.parse(""), kind=RawConversion) as running:
            gradient = self._gradient_of(batches, draw, lambda _: running.forward())
            return self.relative(self.parts.squares(gradient, exact), draw)

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

        On every second one the error of `policy` is measured, too, for `Noise.measured_ratio`. `goes_on`:
        asked whether there is time for more than `fewest` steps, and more than one. Errors count beside this
        noise from then on.
        """
        total: Gradient = [None] * len(self.parameters)
        squares: list[Floats] = []
        sizes: list[float] = []
        errors: list[Floats] = []
        most = max(fewest, most)
        for draw in range(first, first + most):
            show(f"gradient noise, batch {len(squares) + 1} of at most {most}", len(squares) / most)
            gradient = self.exact_gradient(draw)
            squares.append(self.parts.squares(gradient))
            if policy is not None and len(squares) % 2 == 0:
                changed = self._compressed(policy, self._batches(draw), draw, 0)
                errors.append(self.parts.squares(changed, gradient))
                del changed
            add_to(total, gradient)
            del gradient  # before the next one takes memory
            sizes.append(float(squares[-1].sum()))
            if len(sizes) >= max(fewest, 2) and (_is_known(sizes) or not goes_on()):
                break
        noise = noise_of(self.parts, squares, self.parts.squares(total), errors)
        self.own = noise.own
        return noise

    def _batches(self, draw: int) -> list[Any]:
        """Return the micro-batches of one step."""
        count = self.workload.accumulation
        return [self.workload.make_batch(draw=draw * count + index) for index in range(count)]

    def exact_gradient(self, draw: int) -> Gradient:
        """Return the exact gradient of a step, and do not cache it."""
        return self._exact[draw][1] if draw in self._exact else self.gradient(self._batches(draw), draw)

    def gradient(self, batches: Sequence[Any], draw: int) -> Gradient:
        """Return the exact gradient of a step on these micro-batches, with the random states of `draw`."""
        return self._gradient(batches, draw, None, 0)

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
        return undisturbed(self._watch, seed, device, parameters=self.workload.step is not None)


def _is_zero(part: Tensor | None) -> bool:
    return part is not None and part.layout is torch.strided and bool(part.numel()) and not part.any()


def add_to(total: Gradient, gradient: Gradient, factor: float = 1.0) -> None:
    """Add `factor` times a gradient to `total`, of 16 bits in 32: many are added."""
    for index, (sum_, part) in enumerate(zip(total, gradient, strict=True)):
        if part is not None:
            wide = part.float() if part.element_size() < 4 else part
            total[index] = wide * factor if sum_ is None else sum_.add_(wide, alpha=factor)


def _is_known(sizes: Sequence[float]) -> bool:
    """Return whether so many ‖g_b‖² show their mean; asked after every eighth of them."""
    if len(sizes) < FEWEST_NOISE_STEPS or len(sizes) % 8:
        return False
    return statistics.stdev(sizes) <= _NOISE_ERROR * math.sqrt(len(sizes)) * statistics.fmean(sizes)


def _needs_first_step(policy: Policy) -> bool:
    """Return whether the first step of a converted model stores layers differently from later steps.

    This is so if rules name layers by index alone, or if layers derive.
    """
    by_index = any(rule.indices != "all" and rule.names is None for rule in policy.rules)
    return by_index or any(dict(rule.keys).get("store") == "derive" for rule in policy.rules)
