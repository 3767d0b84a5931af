"""mesa-tune: store the activations saved for backward in fewer bits, chosen per layer for a memory budget.

The public names are those of `mesa_tune.api`. They are imported at their first use, because every run of
pytest imports this package for its plugin, and every command for its options: torch alone takes seconds.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesa_tune.api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return a module of the package, or a public name; both are imported here at their first use."""
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    if not name.startswith("_") or name == "__all__":
        names = vars(importlib.import_module("mesa_tune.api"))
        if name in names:
            return globals().setdefault(name, names[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
