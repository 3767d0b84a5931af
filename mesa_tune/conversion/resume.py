"""`state_dict` and `load_state_dict`: a resumed training goes on bit for bit.

What is hard is that a policy is applied in stages: functions get their index after a first forward, and until
then the finest settings apply. So what is known of layers travels with the noise, or the first step after a
resume would store by other settings than the uninterrupted one.
"""

import copy
from typing import Any

import torch
from torch import nn

from mesa_tune.conversion.conversion import Conversion, entries, of_rank
from mesa_tune.conversion.layers import named_layers
from mesa_tune.conversion.wrapping import OWN
from mesa_tune.engine.observer import watch
from mesa_tune.engine.routing import state as running_state
from mesa_tune.errors import PolicyError, RunError
from mesa_tune.policy import Policy

_CPU = torch.device("cpu")
_VERSION = 1
_FLAGS = ("first", "changed", "ended", "unseen", "waits")


def state_dict(model: nn.Module) -> dict[str, Any]:
    """The state of the compression of `model`, to be saved with a training checkpoint.

    It holds the rounding seed with the number of forwards, what codecs remember (running ranges), and what is
    known of the layers. It does not hold the model's own `state_dict`, whose keys stay those of the plain
    model, and not torch's random generators. `torch.load` reads it with `weights_only=True`.

    All processes of a distributed training can load the state of one of them: the rank is taken out, and put
    in again by `load_state_dict`. Running ranges (`ema_decay`) are each process's own: with them, save one
    state per process.

    Raises:
        RunError: `model` is not converted, or one of its forwards runs.
    """
    conversions = _conversions(model)
    return {
        "version": _VERSION,
        "entries": entries.number,
        "conversions": {name: _state(each) for name, each in conversions.items()},
    }


def load_state_dict(model: nn.Module, state: dict[str, Any]) -> None:
    """Puts the compression of `model` into the state that `state_dict` returned.

    Call it after `mt.convert` with the same policy. Together with the own states of the model, the optimizer
    and the random generators (`torch.set_rng_state`), the next step is bit for bit that of the training which
    was saved.

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
    """The conversions of `model` and its parts, by the name of their first module."""
    found: dict[str, Conversion] = {}
    for name, module in named_layers(model):
        own = module.__dict__.get(OWN)
        if own is not None and not own.reverted and own.conversion not in found.values():
            found[name] = own.conversion
    if not found:
        raise RunError("the model is not converted\ncall mt.convert(model, policy) first")
    if any(frame.host in found.values() for frame in running_state.frames):
        raise RunError("a forward of the model runs\nsave and load its state between steps")
    return found


def _state(conversion: Conversion) -> dict[str, Any]:
    """What one conversion needs to go on: plain values, and copies of tensors."""
    return {
        "policy": conversion.policy.dumps(),
        "min_elements": conversion.min_elements,
        "key": conversion.key(_CPU) - of_rank(),
        "catalog": conversion.catalog.state(),
        "flags": {name: getattr(conversion, name) for name in _FLAGS},
        "backward_seen": conversion.backwards != watch.backwards,
        "producers": sorted(conversion.producers),
        "memories": copy.deepcopy(conversion.memories),
    }


def _require_same(conversion: Conversion, state: dict[str, Any]) -> None:
    """Raises PolicyError if `state` is not that of the same policy on the same model."""
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
    """Lets `conversion` go on where `state` was saved."""
    for key in conversion.keys.values():
        key.copy_(state["key"] + of_rank())
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
