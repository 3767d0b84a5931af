"""Warnings that name a layer are given once a process, not once a step."""

import warnings

import torch

_given: set[str] = set()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def warn_once(text: str) -> bool:
    """Warns the first time that `text` is given in this process; True if it did."""
    if text in _given:
        return False
    _given.add(text)
    warnings.warn(text, stacklevel=2)
    return True
