"""A policy put to work on a model that stays as it is: `convert`, `revert`, `compress_saved`."""

from mesa_tune.conversion.model import compress_saved, convert, revert

__all__ = ["compress_saved", "convert", "revert"]
