"""Caches of keys and values, given to modules that run again in backward.

Decoders of transformers fill one in each forward unless `use_cache` is off, also in training, where nothing
reads it. What is hard: a second run would add its keys to those of the first. So both runs go without a cache
that has nothing yet for the module's layers, as in transformers' own checkpointing. It stays without theirs.
"""

from typing import Any

from torch import nn

from mesa_tune.conversion.sliced import Arguments


def without_new_caches(module: nn.Module, args: Any, kwargs: Any) -> Arguments | None:
    """Return the arguments of `module` with None for caches; None if one has keys of its layers."""
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if any(_has_keys(cache, module) for cache in caches):
        return None
    if not caches:
        return args, kwargs
    kept = tuple([None if _is_cache(value) else value for value in args])
    return kept, {name: None if _is_cache(value) else value for name, value in kwargs.items()}


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _has_keys(cache: Any, module: nn.Module) -> bool:
    numbers = {number for each in module.modules() if type(number := getattr(each, "layer_idx", None)) is int}
    return any(int(cache.get_seq_length(number)) > 0 for number in numbers or {0})
