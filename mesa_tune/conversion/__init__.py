"""Converting a model, whose modules are not replaced: `convert`, `revert`, `compress_saved`."""

from mesa_tune.conversion.model import compress_saved, convert, revert

__all__ = ["compress_saved", "convert", "revert"]
