"""Gradient error and noise of a converted model in training, from slices of one of its batches.

What is hard: it must cost little time and memory. A slice of s samples has B / s times the gradient variance
of the whole batch of B, and rounding errors, which are independent, B / s times the squared error: their
ratio is the same. So few samples show the noise ratio. The noise is taken from the differences of
consecutive slices (von Neumann, Ann. Math. Stat. 12(4), 1941), so only one gradient has to be held.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from mesa_tune.conversion.python_state.watch import Watch
from mesa_tune.conversion.trial import LOSS, Trial
from mesa_tune.errors import RunError
from mesa_tune.measure.errors.joint_error import Gradient
from mesa_tune.measure.errors.noise import Parts
from mesa_tune.measure.errors.step_gradient import undisturbed
from mesa_tune.policy import Policy
from mesa_tune.profiles.intervals import interval
from mesa_tune.profiles.own_noise import NO_NOISE, Floats, OwnNoise
from mesa_tune.workload.batches import batch_size, select
from mesa_tune.workload.user_code import mixed_seed

SLICES, FEW_SLICES = 8, 4
"""The noise is measured on so many slices, the error on every second one, or on all if there are few."""
SHARE = 32
"""A slice is 1/32 of the batch or more, see `slice_size`."""
FEW_SAMPLES = 4
"""A batch of fewer is no sample of its own: slices are then the step's batches, if there are several."""
MOST_STEPS = 2.0
"""What measuring within limits may take, in times of a plain step."""
_COMPRESSED = 1.5
"""Times of a compressed slice over a plain one; both on top of what does not shrink with the samples:"""
_PLAIN_CALLS, _COMPRESSED_CALLS = 0.05, 0.2
"""Time of the calls of a plain and a compressed slice, as shares of the plain step of a small Llama."""


class Estimate(NamedTuple):
    """A mean over batches, and the interval in which it lies; None if too little was measured."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Sample:
    """Squared norms of gradients of slices, each a `share` of the batch; arrays of [slices, parts].

    `sizes`: ‖g_i‖² of the plain gradients; `errors`: ‖ĝ_i − g_i‖², of some slices; `variances`:
    ‖g_i − g_j‖² / 2 of consecutive slices.
    """

    share: float
    parts: Parts
    sizes: Floats
    errors: Floats
    variances: Floats

    @property
    def model_is_finite(self) -> bool:
        """Whether all plain gradients are finite."""
        return bool(np.isfinite(self.sizes).all())

    @property
    def is_finite(self) -> bool:
        """Whether all gradients are finite."""
        return self.model_is_finite and bool(np.isfinite(self.errors).all())

    @cached_property
    def own(self) -> OwnNoise | None:
        """The parameters' own noise between slices; None for one slice, or equal ones."""
        if not len(self.variances) or self.variances.sum() < NO_NOISE * self.sizes.sum():
            return None
        return self.parts.own_noise(self.variances.mean(0), self.sizes.mean(0))

    def noise_ratio(self) -> Estimate | None:
        """Return the noise ratio; None where `own` noise is unknown."""
        if self.own is None:
            return None
        ratios = tuple([self.own.ratio(squares) for squares in self.errors])
        doubt = _doubt([self.own.ratio(squares) for squares in self.variances])
        return Estimate(statistics.fmean(ratios), interval(ratios, doubt))

    @property
    def worst(self) -> tuple[str, float] | None:
        """The parameter, or part of one, with the largest own ratio; None where noise is unknown."""
        return None if self.own is None else self.own.worst(self.errors.mean(0))

    def gradient_error(self) -> Estimate | None:
        """Return mean ‖ĝ − g‖² over ‖g‖², both of the whole batch; None if g is zero."""
        least, mean, most = self._sizes_of_batch()
        if mean <= 0:
            return None
        errors = tuple([self.share * float(squares.sum()) for squares in self.errors])
        ends = interval(errors, _doubt(self.variances.sum(1).tolist()))
        return Estimate(
            statistics.fmean(errors) / mean,
            None if ends is None or least <= 0 else (ends[0] / most, ends[1] / least),
        )

    def _sizes_of_batch(self) -> tuple[float, float, float]:
        """Return ‖g‖² of the whole batch, between what it is two standard errors below and above.

        It is the mean product of two slices, ‖E g‖², and the variance of the whole batch.
        """
        sizes, variances = self.sizes.sum(1).tolist(), self.variances.sum(1).tolist()
        if not variances:
            return sizes[0], sizes[0], sizes[0]
        pairs = zip(sizes, sizes[1:], variances, strict=False)
        products = [(first + second) / 2 - variance for first, second, variance in pairs]
        mean, doubt = statistics.fmean(products), 2 * _standard_error(products)
        variance = self.share * statistics.fmean(variances)
        least, middle, most = [max(0.0, mean + sign * doubt) + variance for sign in (-1, 0, 1)]
        return least, middle, most


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _doubt(variances: Sequence[float]) -> float:
    """Return the relative standard error of the mean of variances; each slice is in two of them."""
    mean = statistics.fmean(variances) if variances else 0.0
    return math.sqrt(1.5) * _standard_error(variances) / mean if mean > 0 else 0.0


class SampledError:
    """Measures the converted `model` on slices of `batches`, those of one step; each slice of `samples`.

    The slices are of the last batch, or the batches themselves if they are small. Parameters, buffers,
    gradients, random states and the conversion do not change. At most two gradients are alive besides those
    of the training, and the activations of one slice. `room`: bytes that these gradients may have beside a
    slice of so many samples. Where all parameters' have more, slices are of one sample, or they run again for
    each group of parameters, and so few of them that it takes the time of `MOST_STEPS` plain steps at most.

    Raise RunError for a batch without samples, a model that is not converted as a whole, and where `room`
    would take more time than that.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: Sequence[Any],
        *,
        seed: int,
        samples: int | None = None,
        room: Callable[[int], int] | None = None,
    ) -> None:
        # A forward of the wrapper would synchronize buffers and gradients.
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.loss, self.seed = loss, seed
        self._watch = Watch(self.model)
        self.parts = Parts(self.model)
        self.parameters = self.parts.parameters
        size, count = batch_size(batches[-1]), len(batches)
        whole = count > 1 and size < FEW_SAMPLES  # the step's batches are the slices
        wanted = [size] if whole else [min(size, samples or slice_size(model, size))]
        if not whole and samples is None and not normalizes(model):
            wanted.append(1)
        samples, most = wanted[0], SLICES
        self.groups = [self.parameters]
        if room is not None:
            samples, self.groups, most = self._fitting(room, [(one, one / size / count) for one in wanted])
        self.share = samples / size / count
        starts = range(0, size - samples + 1, samples)[:most]
        self.slices = [select(batches[-1], slice(start, start + samples), size) for start in starts]
        if whole:
            self.slices = list(batches[:most])
        self.trial = Trial(model, samples / size)
        self.device = str(self.parameters[0].device) if self.parameters else "cpu"
        self.tags: dict[str, str] = {}
        self.own: OwnNoise | None = None

    def _fitting(
        self, room: Callable[[int], int], wanted: Sequence[tuple[int, float]]
    ) -> tuple[int, list[list[nn.Parameter]], int]:
        """Return the samples of a slice, groups of parameters, and the most slices; the first that fit.

        `wanted`: samples, and which share of the step they are.
        """
        for calls in (1.0, 0.0):  # where it would not fit otherwise, calls do not count: of large models
            for samples, share in wanted:
                groups = _groups(self.parameters, room(samples) // 2)
                most = _slices_in_time(share, calls, len(groups)) if groups else 0
                if most:
                    return samples, groups, most
        raise RunError(
            f"measuring within the plan's peak would take more time than {MOST_STEPS:g} plain steps\n"
            "give mt.Monitor a larger batch, or no remedy: it then takes memory for two gradients"
        )

    def measure(self) -> Sample:
        """Measure the model as it stores now; `tags` are then those of the compressed layers, by name."""
        if self.trial.is_new:
            self._compressed(0)
        measured = [self._squares(group) for group in self.groups]
        self.tags = self.trial.layers()
        sizes, errors, variances = [np.sum(arrays, axis=0) for arrays in zip(*measured, strict=True)]
        sample = Sample(self.share, self.parts, sizes, errors, variances)
        self.own = sample.own if sample.model_is_finite else None
        return sample

    def _squares(self, group: Sequence[nn.Parameter]) -> tuple[Floats, Floats, Floats]:
        """Return the arrays of a `Sample`, zero for parameters that are not in `group`."""
        sizes, errors, variances = list[Floats](), list[Floats](), list[Floats]()
        before: Gradient | None = None
        for index in range(len(self.slices)):
            plain = self._plain(index, group)
            sizes.append(self.parts.squares(plain))
            if before is not None:
                variances.append(self.parts.squares(plain, before) / 2)
            before = None  # it is freed before the next gradient takes memory
            if index % 2 == 0 or len(self.slices) < FEW_SLICES:
                errors.append(self.parts.squares(self._compressed(index, group=group), plain))
            before = plain
            del plain
        none = np.zeros((0, len(self.parts.names)))
        first, second, third = [
            np.stack(squares) if squares else none for squares in (sizes, errors, variances)
        ]
        return first, second, third

    @cached_property
    def alone(self) -> dict[str, float]:
        """Error on the first slice of each layer by itself, the others exact; the largest first.

        `LOSS` stands for all layers of the loss. An error that is not finite is infinite.
        """
        plain = self._plain(0)
        errors = {name: self._size(self._compressed(0, (name,)), plain) for name in (*self.tags, LOSS)}
        finite = {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}
        return dict(sorted(finite.items(), key=lambda item: -item[1]))

    def _size(self, gradient: Gradient, plain: Gradient) -> float:
        """Return how much a gradient errs: beside own noise, where that was measured."""
        squares = self.parts.squares(gradient, plain)
        if self.own is None or not np.isfinite(squares).all():
            return float(squares.sum())
        return self.own.ratio(squares)

    @property
    def policy(self) -> Policy:
        """The policy of the model."""
        return self.trial.original.policy

    def make_exact(self, layers: Iterable[str], *, seed: int) -> None:
        """Convert the model again, with `layers` of `tags` stored exactly and this rounding seed."""
        self.trial.make_exact({name: self.tags[name] for name in layers}, seed)

    def _plain(self, index: int, group: Sequence[nn.Parameter] | None = None) -> Gradient:
        with self.trial.plain():
            return self._gradient(index, group)

    def _compressed(
        self,
        index: int,
        only: Collection[str] | None = None,
        group: Sequence[nn.Parameter] | None = None,
    ) -> Gradient:
        with self.trial.stored(mixed_seed(self.seed, index), only):
            return self._gradient(index, group)

    def _gradient(self, index: int, group: Sequence[nn.Parameter] | None) -> Gradient:
        """Return the gradient of a slice by `group` (None: all), always with the same random numbers."""
        seed = mixed_seed(self.seed, -1 - index)
        inputs = None if group is None or len(self.groups) == 1 else list(group)
        with undisturbed(self._watch, seed, self.device), torch.enable_grad(), _eager():
            loss = self.loss(self.model, self.slices[index])
            with _without_gradients([*self.parameters, *_leaves(loss)]):
                loss.backward(inputs=inputs)
                return [parameter.grad for parameter in self.parameters]


def _groups(parameters: Sequence[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """Return the parameters in groups of at most `most_bytes`; none where one has more."""
    groups, left = list[list[nn.Parameter]](), 0
    for parameter in parameters:
        if parameter.nbytes > most_bytes:
            return []
        if not groups or parameter.nbytes > left:
            groups.append([])
            left = most_bytes
        groups[-1].append(parameter)
        left -= parameter.nbytes
    return groups


def _slices_in_time(share: float, calls: float, passes: int) -> int:
    """Return the most slices, each a `share` of a plain step, that take `MOST_STEPS`; 0 if fewer than 4 do.

    `calls`: how much the time of calls counts. `passes`: how often all slices run.
    """
    for count in range(SLICES, FEW_SLICES - 1, -1):
        compressed = -(-count // 2)
        computing = share * (count + _COMPRESSED * compressed)
        calling = calls * (_PLAIN_CALLS * count + _COMPRESSED_CALLS * compressed)
        if passes * (computing + calling) <= MOST_STEPS:
            return count
    return 0


def slice_size(model: nn.Module, size: int) -> int:
    """Return the samples of a slice of a batch of `size`: 1/32 of it, and at least 2 if it has 8.

    With batch norm at least 8, of a batch of 32 or more: it normalizes fewer samples otherwise than a batch,
    and slices of 2 showed 1.8 times the noise ratio of a small ResNet at batch 64, slices of 8 1.1 times.
    """
    return max(size // SHARE, min(8 if normalizes(model) else 2, size // FEW_SLICES), 1)


def normalizes(model: nn.Module) -> bool:
    """Return whether samples of a batch are normalized together."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())


def _eager() -> AbstractContextManager[object]:
    """Return a context in which nothing is compiled, and compiled code is not run."""
    is_compiler_loaded = "torch._dynamo" in sys.modules  # importing it takes seconds
    return torch.compiler.set_stance("force_eager") if is_compiler_loaded else nullcontext()


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that a backward of `loss` gives gradients: also those outside of the model."""
    nodes, seen = [loss.grad_fn], {loss.grad_fn, None}
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        below = {function for function, _ in node.next_functions} - seen
        seen |= below
        nodes += below


@contextmanager
def _without_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Set the gradients of `leaves` aside for the body, and the hooks that act on accumulated ones.

    Such a hook may be an optimizer's step.
    """
    kept = {id(leaf): (leaf, leaf.grad, dict(leaf._post_accumulate_grad_hooks or {})) for leaf in leaves}
    for leaf, _, hooks in kept.values():
        leaf.grad = None
        if hooks:
            leaf._post_accumulate_grad_hooks.clear()
    try:
        yield
    finally:
        for leaf, gradient, hooks in kept.values():
            leaf.grad = gradient
            if hooks:
                leaf._post_accumulate_grad_hooks.update(hooks)
