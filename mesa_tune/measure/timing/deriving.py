"""What `store: derive` adds to the time of a step besides encoding, decoding and computing the tensor again.

A layer norm's output is cheap to compute again. But a linear layer that takes it goes backward without the
fused kernel that decodes its input in slices, and a GELU from which others derive saves its input in place of
its derivative. So the spans of a step in which all layers derive are compared with those of steps that store:
what the layers of a derivation add more is its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mesa_tune.measure.timing.option_times import form, means
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.entries import Derivation, LayerEntry
from mesa_tune.profiles.profile import Profile


def with_deriving_times(
    profile: Profile, layers: Sequence[LayerEntry], deriving: Mapping[str, float], settings: LayerSettings
) -> Iterator[Derivation]:
    """Yield the derivations of `profile` with their `call_ms`.

    `layers`: with their own `call_ms`; `deriving`: milliseconds that each layer adds to a step in which all
    store in these `settings` and derive what they can; empty if that was not timed.
    """
    by_name = {layer.name: layer for layer in layers}
    more = {
        name: ms - call_ms
        for name, ms in deriving.items()
        if name in by_name and (call_ms := by_name[name].call_ms) is not None
    }
    shares = Counter(name for one in profile.derivations for name in _names(one))
    found = [_call_ms(one, more, shares, settings) for one in profile.derivations]
    forms = [tuple([form(by_name[name]) for name in _names(one)]) for one in profile.derivations]
    for one, ms in zip(profile.derivations, means(found, forms), strict=True):
        yield replace(one, call_ms=ms or 0.0)


def _names(derivation: Derivation) -> list[str]:
    return list(dict.fromkeys((*derivation.layers, *derivation.takers)))


def _call_ms(
    derivation: Derivation, more: Mapping[str, float], shares: Mapping[str, int], settings: LayerSettings
) -> float | None:
    """Return what the layers of `derivation` add `more` than calls of layers that store; None if unknown.

    `shares`: in how many derivations each layer is. A layer in several has its time in equal parts in each.
    """
    position, names = derivation.positions.get(settings), _names(derivation)
    if position is None or not all(name in more for name in names):
        return None
    return sum(more[name] / shares[name] for name in names) - derivation.options[position].ms
