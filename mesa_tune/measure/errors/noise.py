"""The minibatch's noise: that of each parameter's gradient is the unit in which its errors count.

What is hard: optimizers such as Adam step every parameter alike, however small its gradient. Before training,
q and k carry some 1e-6 of the squared gradient, so an error that is small beside the sum over all parameters
can be 200 times the noise of theirs. So each parameter's error counts beside its own noise. Fused matrices
would hide q and k again: a matrix counts in parts. And gradients that are zero but for rounding, such as
those of a bias before batch norm, have hardly any noise: it counts as at least `FLOOR` of the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from mesa_tune.measure.errors.recorded import as_real
from mesa_tune.profiles.own_noise import FEW_ELEMENTS, NO_NOISE, Floats, OwnNoise, ParameterNoise

MOST_PARTS = 16
_PIECE, _PIECE_ON_CPU = 1 << 20, 1 << 16


class Parts:
    """The trained parameters of a model, and the parts in which they count.

    A matrix has as many equal parts along its larger side as this is larger than the smaller, `MOST_PARTS` at
    most, and so has its bias along this side; a stack of matrices has parts along its first. Embeddings and
    the weights of convolutions are whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters: list[nn.Parameter] = []
        self.cuts: list[tuple[int, int]] = []
        self.whole_names: list[str] = []
        self.names: list[str] = []
        self.elements: list[int] = []
        whole, weights = _whole(model), _weights_of_biases(model)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            dim, count = (0, 1) if parameter in whole else _cut(parameter, weights.get(parameter))
            self.parameters.append(parameter)
            self.whole_names.append(name)
            self.cuts.append((dim, count))
            sizes = (
                [part.numel() for part in parameter.detach().tensor_split(count, dim)] if count > 1 else []
            )
            self.elements += sizes or [parameter.numel()]
            self.names += [f"{name}, part {n + 1} of {count}" for n in range(count)] if count > 1 else [name]
        self._position = {parameter: number for number, parameter in enumerate(self.parameters)}
        self._start = np.cumsum([0, *(count for _, count in self.cuts)]).tolist()

    def own_noise(self, noise: Floats, sizes: Floats, *, is_known: bool = True) -> OwnNoise:
        """Return the own noise of the parts, at least `NO_NOISE` of `sizes`, their mean ‖g‖²."""
        floored = np.maximum(noise, NO_NOISE * sizes).tolist()
        rows = zip(self.names, self.elements, floored, strict=True)
        return OwnNoise(tuple([ParameterNoise(*row) for row in rows]), is_known)

    def squares(
        self, gradient: Sequence[Tensor | None], other: Sequence[Tensor | None] | None = None
    ) -> Floats:
        """Return ‖gradient − other‖² of each part; a gradient that is None counts as zero."""
        others = [None] * len(gradient) if other is None else other
        return self._summed(enumerate(zip(gradient, others, strict=True)), _squared)

    def squares_of(self, difference: Mapping[nn.Parameter, Tensor]) -> Floats:
        """Return ‖difference‖² of each part; a parameter that it lacks counts as zero."""
        tensors = ((self._position[parameter], (delta, None)) for parameter, delta in difference.items())
        return self._summed(tensors, _squared)

    def products(self, first: Mapping[nn.Parameter, Tensor], second: Mapping[nn.Parameter, Tensor]) -> Floats:
        """Return the inner products of two differences within each part."""
        both = first.keys() & second.keys()
        return self._summed(((self._position[one], (first[one], second[one])) for one in both), torch.mul)

    def _summed(
        self,
        tensors: Iterable[tuple[int, tuple[Tensor | None, Tensor | None]]],
        function: Callable[..., Tensor],
    ) -> Floats:
        places, sums = list[int](), list[Tensor]()
        for number, pair in tensors:
            given = [as_real(tensor) for tensor in pair if tensor is not None]
            for part, cut in enumerate(_parts(given, *self.cuts[number]) if given else ()):
                for piece in _pieces(cut):
                    places.append(self._start[number] + part)
                    sums.append(function(*[tensor.double() for tensor in piece]).sum())
        total = np.zeros(self._start[-1])
        if sums:
            np.add.at(total, places, torch.stack([one.to(sums[0].device) for one in sums]).cpu().numpy())
        return total


def squared(tensor: Tensor, other: Tensor | None = None) -> float:
    """Return ‖tensor − other‖²."""
    given = [as_real(one) for one in (tensor, other) if one is not None]
    return sum(float(_squared(*[one.double() for one in piece]).sum()) for piece in _pieces(given))


def _squared(tensor: Tensor, other: Tensor | None = None) -> Tensor:
    return (tensor if other is None else tensor - other).square()


def _parts(tensors: Sequence[Tensor], dim: int, count: int) -> Iterator[Sequence[Tensor]]:
    if count == 1:
        return iter([tensors])
    return zip(*[tensor.tensor_split(count, dim) for tensor in tensors], strict=True)


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Return the tensors in equal pieces: copies in 64 bits of a large one would take much memory."""
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return iter([tensors])
    size = _PIECE if tensors[0].is_cuda else _PIECE_ON_CPU
    return zip(*[tensor.reshape(-1).split(size) for tensor in tensors], strict=True)


def _whole(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that count as one: of embeddings and convolutions."""
    kinds = (nn.Embedding, nn.EmbeddingBag, _ConvNd)
    return {
        parameter
        for module in model.modules()
        if isinstance(module, kinds)
        for parameter in module.parameters(recurse=False)
    }


def _weights_of_biases(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Return for each bias the weight of the same module, such as `in_proj_weight` for `in_proj_bias`."""
    own = [dict(module.named_parameters(recurse=False)) for module in model.modules()]
    return {
        bias: named[weight]
        for named in own
        for name, bias in named.items()
        if (weight := name.replace("bias", "weight")) in named
    }


def _cut(parameter: nn.Parameter, weight: nn.Parameter | None = None) -> tuple[int, int]:
    """Return along which dimension a parameter has parts, and how many; `weight`: of which it is the bias."""
    shape = parameter.shape
    if parameter.dim() == 3:
        return 0, min(max(1, shape[0]), MOST_PARTS)
    if parameter.dim() == 2 and min(shape) > 0:
        count = min(round(max(shape) / min(shape)), MOST_PARTS, parameter.numel() // FEW_ELEMENTS)
        return (0 if shape[0] >= shape[1] else 1), max(1, count)
    if (
        parameter.dim() == 1
        and weight is not None
        and weight.dim() == 2
        and len(parameter) == max(weight.shape)
    ):
        return 0, _cut(weight)[1]
    return 0, 1


@dataclass(frozen=True)
class Noise:
    """The minibatch's own noise: how much the gradients of whole steps vary from batch to batch.

    `relative`: Σ‖g_b − ḡ‖² / (n − 1) over mean ‖g_b‖², of all parameters together. `own`: of each. `count`:
    number of gradients that show it. `errors`: mean ‖ĝ − g‖² of each part under the policy that was measured;
    None if none was. `slices`: of how many slices a batch's gradient is the mean; 1 where it is of none.
    """

    relative: float
    own: OwnNoise
    count: int
    errors: Floats | None = None
    slices: int = 1

    @property
    def measured_ratio(self) -> float | None:
        """The noise ratio of the policy that was measured; None where all batches are the same."""
        return None if self.errors is None or not self.own.is_known else self.own.ratio(self.errors)

    @property
    def worst(self) -> tuple[str, float] | None:
        """The parameter with the largest own ratio under the policy that was measured; None if unknown."""
        return None if self.errors is None else self.own.worst(self.errors)


def noise_of(
    parts: Parts,
    squares: Sequence[Floats],
    total: Floats,
    errors: Sequence[Floats],
    *,
    slices: int = 1,
    micro_batches: int = 1,
) -> Noise:
    """Return the noise of steps' gradients, from squared norms by part: of each, of their sum, of errors.

    `slices`: the squared norms are those of slices of a micro-batch, whose gradient is the mean of so many;
    the gradient of a step is then the sum of those of its `micro_batches`.
    """
    count, size = len(squares), np.mean(squares, axis=0)
    scattered = np.maximum(0.0, count * size - total / count) / max(1, count - 1)
    if slices > 1:
        noise = micro_batches * scattered / slices
        size, scattered = micro_batches**2 * np.maximum(0.0, size - scattered) + noise, noise
    mean = float(size.sum())
    relative = float(scattered.sum()) / mean if mean > 0 else 0.0
    is_known = count > 1 and relative >= NO_NOISE
    own = parts.own_noise(scattered, size) if is_known else parts.own_noise(size, size, is_known=False)
    return Noise(relative, own, count, np.mean(errors, axis=0) if errors else None, slices)
