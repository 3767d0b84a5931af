"""What `torch.compile` needs to know about functions, said without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def constant_result(function: Function) -> Function:
    """Mark `function` as one whose result the compiler calls once and takes for a constant.

    `torch.compiler.assume_constant_result` sets the same attribute, but imports the compiler, which more than
    doubles the time of `import torch`.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
