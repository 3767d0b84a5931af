"""PyTorch's functions with compressed saved activations, for code that calls them by name.

`mesa_tune.functional.gelu(x, settings=LayerSettings(level=16))` is `F.gelu(x)` that keeps 4 bits an element;
the same goes for every function of `torch.nn.functional` that has a route, and for `matmul`. Each runs
PyTorch's forward bit for bit and keeps for backward what its formula says, encoded by `settings`, tensors of
any size included. Standing alone they know no batch: only parameters are kept as they are. Inside a converted
model, and inside `compress_saved`, the policy decides instead, and `settings` rest.
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
from mesa_tune.ops import GOLDEN
from mesa_tune.policy.settings import LayerSettings

_DEFAULT = LayerSettings()
_STEP = GOLDEN - 2**64  # odd, so that the count runs through all keys
_counts = {"cpu": torch.zeros(1, dtype=torch.int64)}


def twin(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch's `function`, one of `ROUTES`, with `settings` as a further keyword."""

    def call(*args: Any, settings: LayerSettings = _DEFAULT, **kwargs: Any) -> Any:
        return alone(function, settings, *args, **kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    call.__doc__ = f"torch's `{function.__name__}`; `settings` say how it stores what it keeps."
    return call


_NAMED = [function for function in ROUTES if function is getattr(F, function.__name__, None)]
TWINS: dict[str, Callable[..., Any]] = {
    function.__name__: twin(function) for function in (*_NAMED, torch.matmul)
}
"""The twins by name: all of `torch.nn.functional` that is routed, and `matmul`."""


def alone(function: Callable[..., Any], settings: LayerSettings, *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, one of `ROUTES`, keeping by `settings` unless a policy is at work."""
    return _by_spec(function, Spec.of(settings, 0), None, None, args, kwargs)


def _by_spec(
    function: Callable[..., Any],
    spec: Spec | None,
    layer: str | None,
    memories: Memories | None,
    args: Any,
    kwargs: Any,
    exact: Sequence[Tensor] = (),
) -> Any:
    if spec is None or policy_at_work() or not torch.is_grad_enabled() or transformed():
        return function(*args, **kwargs)
    route = ROUTES[function]
    call = Call(layer or route.name, spec, _Nowhere(exact), function, args, kwargs, memories)
    return call.served(route)


class _Nowhere:
    """The context of a call outside converted models."""

    def __init__(self, exact: Sequence[Tensor]) -> None:
        self.exact = exact
        self.traced: Traced = []

    def key(self, device: torch.device) -> Tensor:
        """The noise key of the next call."""
        return _key(device)

    def is_static(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a parameter, one of `exact`, or a view of either."""
        return _is_parameter(tensor) or _is_one_of(self.exact, tensor)

    def note(self, layer: str) -> None:
        """Nobody makes outputs again here."""


class StandingAlone(TorchFunctionMode):
    """While this is entered, torch's functions run as their twins here do, by one layer's settings.

    `layer` is its name in warnings (default: the function's), `memories` what its codecs remember of it.
    Parameters are saved as they are, and so are the tensors `exact`.
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


def policy_at_work() -> bool:
    """Whether this runs inside a converted model or `compress_saved`."""
    return state.active


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


def _is_one_of(tensors: Sequence[Tensor], tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return any(base is (each if each._base is None else each._base) for each in tensors)


def _key(device: torch.device) -> Tensor:
    """The noise key of the next call: the seed, and a private count that leaves torch's generators alone.

    The count is a tensor, so that compiled code sees it move.
    """
    name = str(device)
    if name not in _counts:
        _counts[name] = _counts["cpu"].to(device)
    _counts[name].add_(_STEP)
    key: Tensor = _counts[name] + _seed()
    return key


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _seed() -> int:
    return (torch.initial_seed() + 2**63) % 2**64 - 2**63


def __getattr__(name: str) -> Callable[..., Any]:
    if name in TWINS:
        return TWINS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(TWINS))}")


def __dir__() -> list[str]:
    return sorted({*globals(), *TWINS})
