"""PyTorch's functions with compressed saved activations: one file a family, and their public twins.

`mesa_tune.functional.gelu(x, settings=LayerSettings(level=16))` is `F.gelu(x)` that keeps 4 bits an element;
the same goes for every function of `torch.nn.functional` that has a route, and for `matmul`.
"""

from collections.abc import Callable
from typing import Any

from mesa_tune.functional.public import TWINS


def __getattr__(name: str) -> Callable[..., Any]:
    if name in TWINS:
        return TWINS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(TWINS))}")


def __dir__() -> list[str]:
    return sorted({*globals(), *TWINS})
