"""One call of an operator or a module, with its gradients; plain, converted, or with rounded inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import mesa_tune as mt
from mesa_tune.errors import MesaTuneError
from mesa_tune.measure.memory.meter import Meter

FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MesaTuneError),
    *(RuntimeError, TypeError, ValueError),
)
"""What torch and we raise. torch.compile's errors are RuntimeErrors."""


class Lifted(nn.Module):
    """`function` on activations: whatever wants a gradient is no leaf, and the function may write to it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_activation, (args, kwargs))
        return self.function(*args, **kwargs)


def _activation(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value


@dataclass(frozen=True)
class Program:
    """A module, the arguments of its one call, and which part of its output has a definite gradient.

    `compiled`: the module runs under `torch.compile`.
    """

    build: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]
    compiled: bool = False

    def inputs(self) -> list[Tensor]:
        """The arguments that want a gradient."""
        return [each for each in self._tensors() if each.requires_grad]

    def data(self) -> list[Tensor]:
        """The arguments that want none."""
        return [each for each in self._tensors() if not each.requires_grad]

    def _tensors(self) -> list[Tensor]:
        return [each for each in tree_leaves((self.args, self.kwargs)) if isinstance(each, Tensor)]

    def changed(self, change: Callable[[Tensor], Tensor]) -> Program:
        """The program with every dense input replaced by what `change` makes of it."""
        made = {id(each): change(each.detach()).requires_grad_() for each in self.inputs() if _is_dense(each)}

        def changed(value: Any) -> Any:
            return made.get(id(value), value)

        args, kwargs = tree_map(changed, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def plain(self) -> nn.Module:
        """The module as it is."""
        return self._finished(self._built())

    def converted(self, level: int) -> nn.Module:
        """The module with every saved tensor stored in `level` levels, however small it is."""
        policy = mt.Policy.uniform(level=level)
        return self._finished(mt.convert(self._built(), policy, seed=1, min_elements=0))

    def _built(self) -> nn.Module:
        torch.manual_seed(7)
        return self.build()

    def _finished(self, module: nn.Module) -> nn.Module:
        if not self.compiled:
            return module
        compiled: nn.Module = torch.compile(module, backend="aot_eager")  # type: ignore[assignment]
        return compiled


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


@dataclass(frozen=True)
class Step:
    """What a forward and a backward gave: all outputs, a gradient for each input and parameter, and what
    they may have changed: the random generator, the buffers, the arguments without gradient.
    """

    outputs: list[Any]
    gradients: list[Tensor | None]
    state: list[Tensor]


def step(program: Program, module: nn.Module) -> Step:
    """A forward and a backward of `module`, from the same state each time, which is restored."""
    changeable = [each for each in (*module.buffers(), *program.data()) if _is_dense(each)]
    before = [each.clone() for each in changeable]
    torch.manual_seed(5)
    output = module(*program.args, **program.kwargs)
    outputs = [_plain_copy(each) for each in tree_leaves(output)]
    state = [torch.get_rng_state(), *[each.clone() for each in changeable]]
    gradients = _gradients(program, module, output)
    for now, then in zip(changeable, before, strict=True):
        if not _same(now, then):
            now.copy_(then)
    return Step(outputs, gradients, state)


def attempt(program: Program) -> Step | None:
    """The plain step, not compiled; None where PyTorch refuses it."""
    program = replace(program, compiled=False)
    try:
        return step(program, program.plain())
    except FAILURES:
        return None


def _gradients(program: Program, module: nn.Module, output: Any) -> list[Tensor | None]:
    scored = [each for each in tree_leaves(program.process(output)) if _has_gradient(each)]
    leaves = [*program.inputs(), *[each for each in module.parameters() if each.requires_grad]]
    found: Sequence[Tensor | None] = torch.autograd.grad(
        scored, leaves, _cotangents(scored), allow_unused=True
    )
    return [None if each is None else _real(each) for each in found]


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _cotangents(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A gradient for each output that differs from element to element."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in outputs]


def _plain_copy(value: Any) -> Any:
    return _real(value).clone() if isinstance(value, Tensor) else value


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def same(found: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether all values are bitwise equal; one NaN is as good as another."""
    return len(found) == len(right) and all(_same(*pair) for pair in zip(found, right, strict=True))


def _same(found: Any, right: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(right, Tensor):
        return type(found) is type(right) and repr(found) == repr(right)
    if found.dtype != right.dtype or found.shape != right.shape:
        return False
    if not found.is_floating_point():
        return torch.equal(found, right)
    numbers = ~right.isnan()
    signs = torch.equal(found.signbit()[numbers], right.signbit()[numbers])
    return signs and torch.allclose(found, right, rtol=0, atol=0, equal_nan=True)


def bytes_saved(program: Program, module: nn.Module) -> int:
    """Bytes of the storages that a forward leaves alive for its backward."""
    torch.manual_seed(5)
    with Meter() as meter:
        output = module(*program.args, **program.kwargs)
        nodes = [each.grad_fn for each in tree_leaves(output) if _has_gradient(each)]
        del output
        alive: int = meter.live_since(0, without=[*module.parameters(), *module.buffers()])
    del nodes
    return alive


def finite_where(found: Step, right: Step) -> bool:
    """Whether every gradient is there, and finite, wherever `right`'s is."""
    for one, other in zip(found.gradients, right.gradients, strict=True):
        if (one is None) != (other is None):
            return False
        if one is not None and other is not None and not one[other.isfinite()].isfinite().all():
            return False
    return True


def flat(step: Step, like: Step) -> Tensor:
    """All gradients of `step` in one vector of doubles, without the places where `like`'s are not finite."""
    pairs = zip(step.gradients, like.gradients, strict=True)
    parts = [a[b.isfinite()].double() for a, b in pairs if a is not None and b is not None]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
