"""Converted modules whose `forward` somebody else wraps, unwraps or copies (Accelerate, `nn.DataParallel`).

What is hard is that others treat `module.forward` as the bound method that it usually is. They take its
`__func__`, wrap that function and bind the result to the module, or follow `__wrapped__` to the innermost
function and bind that. A deepcopy of a bound method has the old function and the new module. So the
`__func__` of a converted forward refers to no module: it takes the module, and looks up its converted
forward.
"""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from mesa_tune.errors import RunError

CONVERTED = "_mesa_tune"
"""Attribute of a converted module: its converted forward, even if somebody has replaced `forward` since."""

REPLICATE = "_replicate_for_data_parallel"


class ReplacementForward:
    """A forward that replaces a module's.

    `previous`: the forward that the instance had before; None if it used that of its class.
    """

    module: nn.Module
    previous: Callable[..., Any] | None

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that this one replaces."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.previous or type(self.module).forward.__get__(self.module))

    def install(self) -> None:
        """Become the forward of the module."""
        self.previous = self.module.__dict__.get("forward")
        self.module.__dict__["forward"] = self

    def uninstall(self) -> None:
        """Restore the forward that the module had."""
        del self.module.__dict__["forward"]
        if self.previous is not None:
            self.module.__dict__["forward"] = self.previous


class BindableForward(ReplacementForward):
    """A replacement with the attributes of a bound method."""

    @property
    def __func__(self) -> "UnboundForward":
        return UnboundForward(self.__signature__)

    @property
    def __wrapped__(self) -> "UnboundForward":
        if not hasattr(self.previous, "__wrapped__"):
            raise AttributeError("__wrapped__")
        return UnboundForward(self.__signature__, unwraps=True)


class UnboundForward:
    """The converted forward as a function of the module.

    `unwraps`: what wrapped the forward before the conversion is removed when this is bound to a module.
    """

    def __init__(self, signature: inspect.Signature, unwraps: bool = False) -> None:
        module = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        self.__signature__ = signature.replace(parameters=[module, *signature.parameters.values()])
        self.unwraps = unwraps

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_bound(module):
            restore_converted(module)
        return module.__dict__[CONVERTED](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":
            raise AttributeError(
                "a converted model whose forward was just unwrapped cannot be pickled: "
                "call it once first, or mt.revert(model)"
            )
        raise AttributeError(name)


def is_bound(module: nn.Module) -> bool:
    """Return whether somebody has bound an `UnboundForward` to `module` as its `forward`."""
    forward = module.__dict__.get("forward")
    return type(forward) is MethodType and isinstance(forward.__func__, UnboundForward)


def restore_converted(module: nn.Module) -> None:
    """Make the converted forward of `module`, whose function somebody has bound, its `forward` again."""
    converted, function = module.__dict__[CONVERTED], module.__dict__["forward"].__func__
    if function.unwraps and converted.previous is not None:
        innermost = inspect.unwrap(converted.previous)
        converted.previous = None if innermost is type(module).forward else MethodType(innermost, module)
    module.__dict__["forward"] = converted


def calls_converted(forward: Any) -> bool:
    """Return whether `forward` calls a converted forward, according to `__wrapped__`."""
    while forward is not None and not isinstance(forward, (BindableForward, UnboundForward)):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def refuse_replicas() -> None:
    """Replace `module._replicate_for_data_parallel`: replicas would run on the original's weights.

    Raises:
        RunError: always.
    """
    raise RunError(
        "nn.DataParallel over several devices copies a converted model, and the copies cannot be converted\n"
        "use torch.nn.parallel.DistributedDataParallel (one process per device), or mt.revert(model)"
    )
