"""What `torch.compile` needs to know about functions, said without importing the compiler before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def constant_result(function: Function) -> Function:
    """Mark `function` as one whose result the compiler calls once and takes for a constant.

    `torch.compiler.assume_constant_result` sets the same attribute, but imports the compiler, which more than
    doubles the time of `import torch`.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def with_side_effects(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args)`; in traced code, also where it changes Python state inside a checkpoint.

    The compiler refuses such changes, because eager code would repeat them in backward and compiled code does
    not. So `function` must be one for which this makes no difference.
    """
    from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as unchecked

    return unchecked(function, *args, **kwargs)
