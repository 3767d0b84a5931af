"""`state_dict` and `load_state_dict`: a resumed training continues bitwise equal.

What is hard is that a policy is applied in stages: calls of functions get their index after a first forward,
and until then the finest settings apply. So the state contains the layers as well as the noise keys. Without
them, the first step after a resume would store by other settings than the uninterrupted training.
"""

import copy
from typing import Any

import torch
from torch import nn

from mesa_tune.conversion.conversion import Conversion, entries, rank_offset
from mesa_tune.conversion.layers import named_layers
from mesa_tune.conversion.wrapping import CONVERTED
from mesa_tune.engine.observer import watch
from mesa_tune.engine.routing import state as running_state
from mesa_tune.errors import PolicyError, RunError
from mesa_tune.policy import Policy

_CPU = torch.device("cpu")
_VERSION = 1
_FLAGS = ("first", "changed", "ended", "unseen", "waits")


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state of the compression of `model`, to be saved with a training checkpoint.

    It contains the rounding seed with the number of forwards, what codecs remember (running ranges), and the
    layers with their indices. It contains neither the model's `state_dict`, whose keys stay those of the
    plain model, nor torch's random generators. `torch.load` reads it with `weights_only=True`.

    All processes of a distributed training can load the state of one of them: the rank is removed from it,
    and `load_state_dict` adds that of its process. Running ranges (`ema_decay`) differ between processes:
    with them, save one state per process.

    Raises:
        RunError: `model` is not converted, or one of its forwards runs.
    """
    conversions = _conversions(model)
    return {
        "version": _VERSION,
        "entries": entries.number,
        "conversions": {name: _state(conversion) for name, conversion in conversions.items()},
    }


def load_state_dict(model: nn.Module, state: dict[str, Any]) -> None:
    """Put the compression of `model` into the state that `state_dict` returned.

    Call it after `mt.convert` with the same policy. If the states of the model, the optimizer and the random
    generators (`torch.set_rng_state`) are loaded too, the next step is bitwise that of the saved training.

    Raises:
        RunError: `model` is not converted, one of its forwards runs, or `state` is of another version.
        PolicyError: `state` was saved under another policy or for another model.
    """
    conversions = _conversions(model)
    if state.get("version") != _VERSION:
        raise RunError(
            f"this state has version {state.get('version')!r}, but this mesa-tune reads version {_VERSION}\n"
            "load it with the version of mesa-tune that saved it, or start without it"
        )
    saved = state["conversions"]
    if set(saved) != set(conversions):
        raise RunError(
            f"the state is of models converted at {_shown(saved)}, but this model is converted at "
            f"{_shown(conversions)}\nconvert the same modules as in the training that was saved"
        )
    for name, conversion in conversions.items():
        _require_same(conversion, saved[name])
    for name, conversion in conversions.items():
        _load(conversion, saved[name])
    entries.number = state["entries"]


def _conversions(model: nn.Module) -> dict[str, Conversion]:
    """Return the conversions of `model` and its parts, by the name of their first module."""
    conversions: dict[str, Conversion] = {}
    for name, module in named_layers(model):
        forward = module.__dict__.get(CONVERTED)
        if forward and not forward.reverted and forward.conversion not in conversions.values():
            conversions[name] = forward.conversion
    if not conversions:
        raise RunError("the model is not converted\ncall mt.convert(model, policy) first")
    if any(frame.host in conversions.values() for frame in running_state.frames):
        raise RunError("a forward of the model runs\nsave and load its state between steps")
    return conversions


def _state(conversion: Conversion) -> dict[str, Any]:
    """Return the state of one conversion: plain values, and copies of tensors."""
    return {
        "policy": conversion.policy.dumps(),
        "min_elements": conversion.min_elements,
        "key": conversion.key(_CPU) - rank_offset(),
        "catalog": conversion.catalog.state(),
        "flags": {name: getattr(conversion, name) for name in _FLAGS},
        "backward_seen": conversion.backwards != watch.backwards,
        "producers": sorted(conversion.producers),
        "memories": copy.deepcopy(conversion.memories),
    }


def _require_same(conversion: Conversion, state: dict[str, Any]) -> None:
    """Raise PolicyError if `state` is not that of the same policy on the same model."""
    saved = Policy.parse(state["policy"], source="the state")
    if state["catalog"]["fingerprint"] != conversion.catalog.fingerprint:
        raise PolicyError(
            "the state was saved for another model: its modules have other names or classes\n"
            "load it into the model that was trained"
        )
    if saved not in {conversion.policy, conversion.policy.bind_attention()}:
        raise PolicyError(
            "the state was saved under another policy than the model is converted with\n"
            "convert with that one: its text is in the state, under 'conversions' and 'policy'"
        )
    if state["min_elements"] != conversion.min_elements:
        raise PolicyError(
            f"the state was saved with min_elements={state['min_elements']}, but the model is converted with "
            f"min_elements={conversion.min_elements}\nconvert with the same"
        )


def _load(conversion: Conversion, state: dict[str, Any]) -> None:
    """Put `conversion` into `state`."""
    for key in conversion.keys.values():
        key.copy_(state["key"] + rank_offset())
    conversion.policy = Policy.parse(state["policy"], source=conversion.policy.source)
    conversion.catalog.load_state(state["catalog"])
    for name in _FLAGS:
        setattr(conversion, name, state["flags"][name])
    conversion.backwards = watch.backwards - int(state["backward_seen"])
    conversion.producers = set(state["producers"])
    conversion.memories = copy.deepcopy(state["memories"])
    conversion.specs.clear()
    conversion.calls.clear()


def _shown(names: Any) -> str:
    return ", ".join(repr(name) for name in sorted(names))
