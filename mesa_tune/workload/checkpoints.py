"""Checkpointing switched off for a while, however a model's code has got hold of `checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.utils.checkpoint


class _Direct:
    """Stands for `CheckpointFunction`: runs the function as it is."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Stands for the generator of what a non-reentrant checkpoint does before and after its function."""
    yield


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """In the body `torch.utils.checkpoint.checkpoint` calls its function, and that is all."""
    module = torch.utils.checkpoint
    with (
        patch.object(module, "CheckpointFunction", _Direct),
        patch.object(module, "_checkpoint_without_reentrant_generator", _nothing),
    ):
        yield
