"""A context in which activation checkpointing is off.

The hard part: a model may have imported `checkpoint` under any name, so what `checkpoint` calls is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.utils.checkpoint


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
