"""Masks that are the sum of two smaller tensors (a relative bias for each head, a mask for each window).

Attention saves the two before broadcasting, and adds them again in backward, bitwise equal. What is hard is
to know that neither has changed since: the registry stores their versions. Traced code saves the sum itself.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesa_tune.engine.registry import registry

ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_WORTH = 2
"""A sum is noted if it has at least this many times the elements of both parts together."""

Pair = tuple[Tensor, Tensor]


class _Sum(NamedTuple):
    """A sum and its parts, with their versions."""

    version: int
    parts: list[weakref.ref[Tensor]]
    versions: list[int]


def _name(total: Tensor) -> tuple[Any, ...]:
    return "sum", total.shape, total.stride(), total.storage_offset()


def note(output: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Note that `output` is the sum of `args`, if they are much smaller."""
    if kwargs or len(args) != 2 or torch.compiler.is_compiling():
        return
    if getattr(args[0], "shape", None) == getattr(args[1], "shape", None):
        return
    if not all(isinstance(tensor, Tensor) and tensor.layout is torch.strided for tensor in (*args, output)):
        return
    if output.numel() >= _WORTH * sum(tensor.numel() for tensor in args):
        parts, versions = [weakref.ref(tensor) for tensor in args], [tensor._version for tensor in args]
        registry.file(output)[_name(output)] = _Sum(output._version, parts, versions)


def parts(total: Tensor) -> Pair | None:
    """Return the two tensors whose sum is `total`, detached; None unless both are alive and unchanged."""
    if torch.compiler.is_compiling() or total.layout is not torch.strided:
        return None
    facts = registry.facts(total)
    known: _Sum | None = None if facts is None else facts.get(_name(total))
    if known is None or known.version != total._version:
        return None
    first, second = (reference() for reference in known.parts)
    if first is None or second is None or [first._version, second._version] != known.versions:
        return None
    return first.detach(), second.detach()
