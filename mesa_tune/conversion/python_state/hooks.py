"""Hooks of somebody else, which see each run of a module."""

import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch.nn.modules.module as torch_modules
from torch import nn

_RECORDING = "transformers.utils.output_capturing"


def has_foreign_hooks(modules: Sequence[nn.Module]) -> bool:
    """Return whether hooks of one of `modules`, or of all modules there are, do something in a forward.

    Those of transformers that record outputs do nothing unless a forward has asked for these outputs.
    """
    of_all = chain(
        torch_modules._global_forward_hooks.values(), torch_modules._global_forward_pre_hooks.values()
    )
    if not all(map(_is_ours, of_all)):
        return True
    hooked = [one for one in modules if has_hooks(one)]
    found = (chain(one._forward_pre_hooks.values(), one._forward_hooks.values()) for one in hooked)
    return not all(map(_is_idle, chain.from_iterable(found)))


def _is_ours(hook: Callable[..., Any]) -> bool:
    """Return whether a hook of all modules is ours: it notes sizes, and does nothing."""
    return str(getattr(hook, "__module__", "")).startswith("mesa_tune.")


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks run in the forward of `module`."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_idle(hook: Callable[..., Any]) -> bool:
    if getattr(hook, "__module__", None) != _RECORDING:
        return False
    collected = sys.modules[_RECORDING]._active_collector.get()
    return collected is None or inspect.getclosurevars(hook).nonlocals.get("key") not in collected
