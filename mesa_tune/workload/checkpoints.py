"""Contexts in which activation checkpointing is off, or on.

The hard part: a model may have imported `checkpoint` under any name, so what `checkpoint` calls is replaced.
And a model that was not written for it has parts that save too much: the elements of its lists of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch.utils.checkpoint
from torch import nn


class _Direct:
    """Replacement for `CheckpointFunction` that only calls the function."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Replacement for the generator of a non-reentrant checkpoint, without work before and after it."""
    yield


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """In the body `torch.utils.checkpoint.checkpoint` only calls its function."""
    module = torch.utils.checkpoint
    with (
        patch.object(module, "CheckpointFunction", _Direct),
        patch.object(module, "_checkpoint_without_reentrant_generator", _nothing),
    ):
        yield


@contextmanager
def with_checkpoints(model: nn.Module) -> Iterator[None]:
    """In the body the repeated parts of `model` save their inputs alone, and run again in backward.

    These are the elements of its outermost lists and sequences of modules; without any, its children.
    Gradients are bitwise those of the plain model.
    """
    with ExitStack() as stack:
        for part in _elements(model) or list(model.children()):
            stack.enter_context(patch.object(part, "forward", _checkpointed(part.forward)))
        yield


def _elements(model: nn.Module) -> list[nn.Module]:
    """Return the elements of the outermost lists and sequences of modules; of nested lists, the innermost."""
    if isinstance(model, nn.ModuleList):
        parts = [_elements(element) if isinstance(element, nn.ModuleList) else [element] for element in model]
        return list(chain.from_iterable(parts))  # a list has no forward of its own
    if isinstance(model, nn.Sequential):
        return list(model)
    return [part for child in model.children() for part in _elements(child)]


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)

    return run
