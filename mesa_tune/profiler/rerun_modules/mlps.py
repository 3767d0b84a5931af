"""MLPs that could run in slices of their rows (`tile`, `on module:`).

What is hard: what acts on each row by itself has no common class or name. So these are the outermost modules
with two linear layers at least, and besides them only functions that no MLP is without; running them shows
whether they can be cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from mesa_tune.profiler.memory.step_trace import StepTrace, block_of

_LINEAR = {"fc", "matmul"}
_OTHERS = {"gelu", "relu", "silu", "mul", "pointwise", "dropout", "layernorm", "rmsnorm"}
_LEAST = 0.05
"""Least share of what the plain step saves that MLPs must save to be worth it."""


def possible_mlps(model: nn.Module, plain: StepTrace, tags: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
    """Return the modules that are MLPs by their layers; () if they save little. `plain`: the plain step."""
    found = tuple(_outermost(model, tags))
    saved = sum(
        plain.lifetimes[number].bytes
        for number, item in plain.plain.items()
        if plain.is_counted(number) and all(block_of(layer, found) for layer in item.layers)
    )
    return found if saved >= _LEAST * plain.saved_bytes else ()


def _outermost(model: nn.Module, tags: Mapping[str, tuple[str, int]]) -> Iterator[str]:
    found: list[str] = []
    for name, _ in model.named_modules():
        if not name or block_of(f"{name}.", found):
            continue
        inside = [tag for layer, (tag, _) in tags.items() if layer.startswith(f"{name}.")]
        linear = sum(tag in _LINEAR for tag in inside)
        if linear > 1 and _OTHERS.issuperset(set(inside) - _LINEAR):
            found.append(name)
            yield name
