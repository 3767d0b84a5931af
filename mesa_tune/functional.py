"""PyTorch's functions with compressed saved activations, for code that calls them by name.

`mesa_tune.functional.gelu(x, settings=LayerSettings(level=16))` is `F.gelu(x)`, but saves 4 bits per element.
The same exists for every function of `torch.nn.functional` that has a route, and for `matmul`. Each runs
PyTorch's forward bitwise equal, and saves what its formula says, encoded by `settings`, whatever the size of
the tensors. What is hard is that there is no conversion here: nobody tells which tensors are the batch, so
only parameters stay exact, and rounding noise needs its own count. Inside a converted model, and inside
`compress_saved`, the policy decides, and `settings` have no effect.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mesa_tune.codecs import Spec
from mesa_tune.engine.call import Call
from mesa_tune.engine.function import Memories
from mesa_tune.engine.rematerialize import Traced
from mesa_tune.engine.routing import state, transformed
from mesa_tune.formulas.table import ROUTES
from mesa_tune.ops import NOISE_STEP, as_int64
from mesa_tune.policy.settings import LayerSettings

_DEFAULT = LayerSettings()
_counts = {"cpu": torch.zeros(1, dtype=torch.int64)}


def _with_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `function`, one of `ROUTES`, with `settings` as a further keyword."""

    def call(*args: Any, settings: LayerSettings = _DEFAULT, **kwargs: Any) -> Any:
        return _by_spec(function, Spec.of(settings, 0), None, None, args, kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    call.__doc__ = f"torch's `{function.__name__}`; `settings` say how it stores what it saves."
    return call


_ROUTED = [function for function in ROUTES if function is getattr(F, function.__name__, None)]
FUNCTIONS = {function.__name__: _with_settings(function) for function in (*_ROUTED, torch.matmul)}
"""The functions with settings, by name: all of `torch.nn.functional` that is routed, and `matmul`."""


def _by_spec(
    function: Callable[..., Any],
    spec: Spec | None,
    layer: str | None,
    memories: Memories | None,
    args: Any,
    kwargs: Any,
    exact: Sequence[Tensor] = (),
) -> Any:
    if spec is None or policy_applies() or not torch.is_grad_enabled() or transformed():
        return function(*args, **kwargs)
    route = ROUTES[function]
    call = Call(layer or route.name, spec, _NoConversion(exact), function, args, kwargs, memories)
    return call.run_by(route)


class _NoConversion:
    """The context of a call outside converted models."""

    def __init__(self, exact: Sequence[Tensor]) -> None:
        self.exact = exact
        self.traced: Traced = []

    def key(self, device: torch.device) -> Tensor:
        """Return the noise key of the next call: the seed plus a private count, without torch's generators.

        The count is a tensor, so that it advances in compiled code as well.
        """
        name = str(device)
        if name not in _counts:
            _counts[name] = _counts["cpu"].to(device)
        _counts[name].add_(NOISE_STEP)
        key: Tensor = _counts[name] + _seed()
        return key

    def is_static(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a parameter, one of `exact`, or a view of either."""
        base = _base(tensor)
        return isinstance(base, nn.Parameter) or any(base is _base(other) for other in self.exact)

    def note(self, layer: str) -> None:
        """Do nothing: outputs are not rematerialized here."""


class SettingsMode(TorchFunctionMode):
    """While this is entered, torch's functions run as those of this module do, by one layer's settings.

    `layer` is its name in warnings (default: the function's), `memories` what codecs remember of it.
    Parameters and the tensors `exact` are saved as they are.
    """

    def __init__(
        self,
        settings: LayerSettings | Spec | None,
        layer: str | None = None,
        memories: Memories | None = None,
        exact: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self.spec = Spec.of(settings, 0) if isinstance(settings, LayerSettings) else settings
        self.layer = layer
        self.memories = memories
        self.exact = exact

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ROUTES:
            return _by_spec(func, self.spec, self.layer, self.memories, args, kwargs or {}, self.exact)
        return func(*args, **(kwargs or {}))


def policy_applies() -> bool:
    """Return whether this runs inside a converted model or `compress_saved`."""
    return state.active


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _seed() -> int:
    return as_int64(torch.initial_seed())


def __getattr__(name: str) -> Callable[..., Any]:
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    names = ", ".join(sorted(FUNCTIONS))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {names}")


def __dir__() -> list[str]:
    return sorted({*globals(), *FUNCTIONS})
