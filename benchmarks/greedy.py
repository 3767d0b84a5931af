"""Bits by layer as GACT and ActNN allocate them: greedily, one layer after another."""

from __future__ import annotations

from collections.abc import Callable

import mesa_tune as mt
from mesa_tune.policy.settings import LayerSettings

BITS = (8, 4, 3, 2, 1)


def greedy(
    profile: mt.Profile, size: Callable[[mt.Policy], int], limit: int, *, law: bool
) -> mt.Policy | None:
    """Return bits by layer of which `size` is within `limit`: reduced first where an error per byte is least.

    `law`: errors are those at 4 bits by the law of quantization noise, not measured ones.
    """
    layers = profile.layers
    options = [LayerSettings(level=2**bits) for bits in BITS]
    errors = [[profile.layer_error(layer, option) or 0.0 for option in options] for layer in layers]
    if law:
        steps = [(15 / (2**bits - 1)) ** 2 for bits in BITS]
        errors = [[row[BITS.index(4)] * step for step in steps] for row in errors]
    chosen = [0] * len(layers)

    def policy() -> mt.Policy:
        settings = (options[step] for step in chosen)
        rules = zip(layers, settings, strict=True)
        return mt.Policy.from_assignments((one.tag, one.index, one.name, each) for one, each in rules)

    def price(number: int) -> float:
        step = chosen[number]
        saved = layers[number].own_bytes * (BITS[step] - BITS[step + 1])
        return (errors[number][step + 1] - errors[number][step]) / max(1, saved)

    while size(policy()) > limit:
        left = [number for number, step in enumerate(chosen) if step + 1 < len(BITS)]
        if not left:
            return None
        chosen[min(left, key=price)] += 1
    return policy()
