"""Parts of blocks that could run in slices (`tile`, `on module:`): MLPs of their rows, attention of samples.

What is hard: what acts on each row or sample by itself has no common class or name. So these are the
outermost modules with two linear layers at least, and besides them only functions that MLPs have, one of
which saves something (LoRA has none), or one attention; running them shows whether they can be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import nn

from mesa_tune.conversion.layers import named_layers
from mesa_tune.measure.memory.step_trace import StepTrace
from mesa_tune.profiles.timeline.step_arrays import block_of

SLICES = 4
"""Slices of a part: each takes about half a millisecond on the CPU, however small."""

_LINEAR = {"fc", "matmul"}
_SCALING = "scaling"
"""In place of `mul`, if neither factor is saved: a product with a number."""

_BOTH = {_SCALING, "mul", "pointwise", "dropout", "layernorm", "rmsnorm"}
_ACTIVATIONS = {"mul", "pointwise", "gelu", "relu", "silu"}
_OF_MLPS = {*_BOTH, *_ACTIVATIONS}
_ATTENTION = {"attention", "softmax"}
_LEAST = 0.05
"""Least share of what the plain step saves that parts of one kind must save to be worth it."""


def possible_parts(
    model: nn.Module, plain: StepTrace, tags: Mapping[str, tuple[str, int]], batch_size: int
) -> dict[str, int]:
    """Return parts by their layers, and in how many slices they could run; {} if they save little.

    `plain`: the plain step. Attention must have at least two samples in half of the batch.
    """
    saving = plain.saving_layers
    kinds = {
        layer: _SCALING if tag == "mul" and layer not in saving else tag for layer, (tag, _) in tags.items()
    }
    mlps = _outermost(model, kinds, _is_mlp)
    attention = _outermost(model, kinds, _is_attention, without=mlps)
    count = _of_samples(batch_size)
    found = dict.fromkeys(_worth_it(plain, mlps), SLICES)
    return found | (dict.fromkeys(_worth_it(plain, attention), count) if count > 1 else {})


def _is_mlp(tags: Collection[str]) -> bool:
    """Return whether these are the tags of an MLP; LoRA has only a product with a number."""
    return (
        _has_layers(tags) and not _ACTIVATIONS.isdisjoint(tags) and _OF_MLPS.issuperset(set(tags) - _LINEAR)
    )


def _is_attention(tags: Collection[str]) -> bool:
    """Return whether these are the tags of one attention, perhaps with its norm."""
    others = {*_LINEAR, *_BOTH, *_ATTENTION}
    return _has_layers(tags) and sum(tag in _ATTENTION for tag in tags) == 1 and others.issuperset(tags)


def _has_layers(tags: Collection[str]) -> bool:
    return sum(tag in _LINEAR for tag in tags) > 1


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


def _outermost(
    model: nn.Module,
    tags: Mapping[str, str],
    is_part: Callable[[Collection[str]], bool],
    without: Collection[str] = (),
) -> tuple[str, ...]:
    """Return the outermost modules of which the tags of layers inside are those of a part.

    None of them contains one of the modules `without`.
    """
    found: list[str] = []
    for name, _ in named_layers(model):
        if not name or block_of(f"{name}.", found) or any(block_of(f"{part}.", [name]) for part in without):
            continue
        if is_part([tag for layer, tag in tags.items() if layer.startswith(f"{name}.")]):
            found.append(name)
    return tuple(found)
