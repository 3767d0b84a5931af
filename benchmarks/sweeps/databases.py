"""PyTorch's own databases of operators and modules as programs with sample inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

from benchmarks.sweeps.steps import Lifted, Program

MOST = 16
"""Samples of one operator or module that are tried."""
SEEDS = 4
"""How often an operator with few samples has them, with other numbers each time."""
LARGEST = 50_000
"""Elements of a sample that is not too slow to be run hundreds of times."""


@cache
def operators() -> dict[str, Any]:
    """The operators that have a gradient in float32, by name."""
    return {_name(info): info for info in op_db if _has_gradient(info)}


def without_gradient() -> list[str]:
    """The names of the other operators."""
    return [_name(info) for info in op_db if not _has_gradient(info)]


def _name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}".rstrip(".")


def _has_gradient(info: Any) -> bool:
    return bool(info.supports_autograd and torch.float32 in info.supported_backward_dtypes("cpu"))


@cache
def modules() -> dict[str, Any]:
    """The modules, by name (`nn.Linear`)."""
    return {info.name: info for info in module_db if torch.float32 in info.dtypes}


def programs(name: str, most: int = MOST) -> list[Program]:
    """Up to `most` sample programs of an operator or a module: the same ones at each call."""
    samples: list[Program] = []
    for seed in range(SEEDS):
        if len(samples) < most:
            samples += _samples(name, seed)
    return [each.changed(Tensor.clone) for each in _spread(samples, most)]


def _samples(name: str, seed: int) -> list[Program]:
    """All samples with the data of `seed`, less those that are too small or too slow, if others are left."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    samples = list(_of_module(modules()[name]) if name in modules() else _of_operator(operators()[name]))
    return [each for each in samples if 4 < elements(each) <= LARGEST] or samples


def _of_operator(info: Any) -> Iterator[Program]:
    for sample in islice(info.sample_inputs("cpu", torch.float32, requires_grad=True), 1000):
        args = (sample.input, *sample.args)
        yield Program(partial(Lifted, info.op), args, dict(sample.kwargs), sample.output_process_fn_grad)


def _of_module(info: Any) -> Iterator[Program]:
    for training in (True, False):
        given = {"device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": training}
        for sample in info.module_inputs_func(info, **given):
            build = partial(_built, info.module_cls, sample, training)
            call = sample.forward_input
            yield Program(build, tuple(call.args), dict(call.kwargs), _as_it_is)


def _built(kind: Callable[..., nn.Module], sample: Any, training: bool) -> nn.Module:
    module = kind(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(training)
    if isinstance(module, LazyModuleMixin):
        with torch.no_grad():
            module(*sample.forward_input.args, **sample.forward_input.kwargs)
    return Lifted(module)


def _as_it_is(output: Any) -> Any:
    return output


def elements(program: Program) -> int:
    """How many numbers want a gradient."""
    return sum(each.numel() for each in program.inputs())


def _spread(samples: Sequence[Program], most: int) -> list[Program]:
    count = min(most, len(samples))
    return [samples[index * len(samples) // count] for index in range(count)]


def scaled(program: Program) -> list[Program]:
    """The program with the rows of its inputs scaled from 1e-3 to 1e3."""

    def scale(x: Tensor) -> Tensor:
        if x.dim() == 0:
            return x
        factors = torch.logspace(-3, 3, len(x))
        return x * factors.view(-1, *[1] * (x.dim() - 1))

    return [program.changed(scale)]


def masked(program: Program) -> list[Program]:
    """The program with every third element of its inputs at -Inf; and with the last row wholly so, too."""

    def mask(x: Tensor, row: bool = False) -> Tensor:
        hidden = torch.arange(x.numel()).view(x.shape) % 3 == 1
        if row and x.dim() > 1:
            hidden[-1:] = True
        return x.masked_fill(hidden, -torch.inf)

    return [program.changed(mask), program.changed(partial(mask, row=True))]


def as_sampled(program: Program) -> list[Program]:
    """The program as it is."""
    return [program]


def names() -> list[str]:
    """All operators, then all modules."""
    return [*operators(), *modules()]
