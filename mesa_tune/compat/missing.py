"""Error messages for the names of other projects that mesa_tune.compat does not provide."""

from collections.abc import Callable, Mapping
from typing import Any


def unsupported(module: str, reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `module` that raises AttributeError with the reason from `reasons`."""

    def getattribute(name: str) -> Any:
        reason = f"not supported: {reasons[name]}" if name in reasons else "no such name"
        raise AttributeError(f"{module}.{name}: {reason}")

    return getattribute
