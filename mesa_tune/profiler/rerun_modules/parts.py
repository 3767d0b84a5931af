"""Parts of blocks that could run in slices (`tile`, `on module:`): MLPs of their rows, attention of samples.

What is hard: what acts on each row or sample by itself has no common class or name. So these are the
outermost modules with two linear layers at least, and besides them only functions that MLPs, or attention,
have; running them shows whether they can be cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from mesa_tune.profiler.memory.step_trace import StepTrace, block_of

SLICES = 4
"""Slices of a part: each takes about half a millisecond on the CPU, however small."""

_LINEAR = {"fc", "matmul"}
_BOTH = {"mul", "pointwise", "dropout", "layernorm", "rmsnorm"}
_OF_MLPS = {*_BOTH, "gelu", "relu", "silu"}
_OF_ATTENTION = {*_BOTH, "attention", "softmax"}
_LEAST = 0.05
"""Least share of what the plain step saves that parts of one kind must save to be worth it."""


def possible_parts(
    model: nn.Module, plain: StepTrace, tags: Mapping[str, tuple[str, int]], batch_size: int
) -> dict[str, int]:
    """Return parts by their layers, and in how many slices they could run; {} if they save little.

    `plain`: the plain step. Attention must have at least two samples in half of the batch.
    """
    found = dict.fromkeys(_worth_it(plain, _outermost(model, tags, _OF_MLPS)), SLICES)
    count = _of_samples(batch_size)
    return found | dict.fromkeys(
        _worth_it(plain, _outermost(model, tags, _OF_ATTENTION)) if count > 1 else (), count
    )


def _of_samples(batch_size: int) -> int:
    """Return in how many slices to cut samples: the largest is to be half as large at half of the batch.

    Bytes at other batch sizes are predicted in proportion.
    """
    half = batch_size // 2
    alike = (
        n for n in (SLICES, 3, 5, 2) if n <= half and -(-batch_size // n) * half == -(-half // n) * batch_size
    )
    return next(alike, min(SLICES, half))


def _worth_it(plain: StepTrace, found: tuple[str, ...]) -> tuple[str, ...]:
    """Return the modules `found` if they save much."""
    saved = sum(
        plain.lifetimes[number].bytes
        for number, item in plain.plain.items()
        if plain.is_counted(number) and all(block_of(layer, found) for layer in item.layers)
    )
    return found if saved >= _LEAST * plain.saved_bytes else ()


def _outermost(model: nn.Module, tags: Mapping[str, tuple[str, int]], others: set[str]) -> tuple[str, ...]:
    """Return the outermost modules of linear layers and of others with these tags."""
    found: list[str] = []
    for name, _ in model.named_modules():
        if not name or block_of(f"{name}.", found):
            continue
        inside = [tag for layer, (tag, _) in tags.items() if layer.startswith(f"{name}.")]
        linear = sum(tag in _LINEAR for tag in inside)
        if linear > 1 and others.issuperset(set(inside) - _LINEAR):
            found.append(name)
    return tuple(found)
