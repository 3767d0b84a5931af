"""Converted modules whose `forward` somebody else wraps, unwraps or copies (Accelerate, `nn.DataParallel`).

What is hard is that others treat `module.forward` as the bound method that it usually is. They take its
`__func__`, wrap that function and bind the result to the module, or follow `__wrapped__` to the innermost
function and bind that. A deepcopy of a bound method has the old function and the new module. So the function
that a converted forward gives away knows no module: it takes the module, and asks it for its own forward.
"""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from mesa_tune.errors import RunError

OWN = "_mesa_tune"
"""Attribute of a converted module: its converted forward, whatever `forward` is by now."""

REPLICATE = "_replicate_for_data_parallel"


class Instead:
    """A forward in the place of a module's own.

    `before`: the forward that the instance had; None for that of its class.
    """

    module: nn.Module
    before: Callable[..., Any] | None

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward without us."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.before or type(self.module).forward.__get__(self.module))

    def hang(self) -> None:
        """Becomes the forward of the module."""
        self.before = self.module.__dict__.get("forward")
        self.module.__dict__["forward"] = self

    def take_down(self) -> None:
        """The module gets back the forward that it had."""
        del self.module.__dict__["forward"]
        if self.before is not None:
            self.module.__dict__["forward"] = self.before


class Rebindable(Instead):
    """What a converted forward has in common with a bound method."""

    @property
    def __func__(self) -> "Unbound":
        return Unbound(self.__signature__)

    @property
    def __wrapped__(self) -> "Unbound":
        if not hasattr(self.before, "__wrapped__"):
            raise AttributeError("__wrapped__")
        return Unbound(self.__signature__, outermost=True)


class Unbound:
    """The converted forward as a function of the module.

    `outermost`: it stands for the forward without what had wrapped it before the conversion.
    """

    def __init__(self, signature: inspect.Signature, outermost: bool = False) -> None:
        module = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        self.__signature__ = signature.replace(parameters=[module, *signature.parameters.values()])
        self.outermost = outermost

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = module.__dict__[OWN]
        if is_bound(module):
            put_back(module)
        return own(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":
            raise AttributeError(
                "a converted model whose forward was just unwrapped cannot be pickled: "
                "call it once first, or mt.revert(model)"
            )
        raise AttributeError(name)


def is_bound(module: nn.Module) -> bool:
    """Whether somebody has bound our function to `module` as its `forward`."""
    forward = module.__dict__.get("forward")
    return type(forward) is MethodType and isinstance(forward.__func__, Unbound)


def put_back(module: nn.Module) -> None:
    """Makes the converted forward of `module`, whose function somebody has bound, its `forward` again."""
    own, function = module.__dict__[OWN], module.__dict__["forward"].__func__
    if function.outermost and own.before is not None:
        innermost = inspect.unwrap(own.before)
        own.before = None if innermost is type(module).forward else MethodType(innermost, module)
    module.__dict__["forward"] = own


def leads_to_ours(forward: Any) -> bool:
    """Whether `forward` calls a converted forward, as far as `__wrapped__` tells."""
    while forward is not None and not isinstance(forward, (Rebindable, Unbound)):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def refuse_replicas() -> None:
    """Stands in for `module._replicate_for_data_parallel`: replicas would run on the original's weights.

    Raises:
        RunError: always.
    """
    raise RunError(
        "nn.DataParallel over several devices copies a converted model, and the copies cannot be converted\n"
        "use torch.nn.parallel.DistributedDataParallel (one process per device), or mt.revert(model)"
    )
