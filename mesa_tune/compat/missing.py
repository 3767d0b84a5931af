"""Names of the projects that have no meaning here: asking for one says why."""

from collections.abc import Callable, Mapping
from typing import Any


def unsupported(module: str, reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of `module`, which raises AttributeError with the reason for a name in `reasons`."""

    def getattribute(name: str) -> Any:
        reason = f"not supported: {reasons[name]}" if name in reasons else "no such name"
        raise AttributeError(f"{module}.{name}: {reason}")

    return getattribute
