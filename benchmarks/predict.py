"""How long does `Profile.predict` take for a model of 300 layers?

    python benchmarks/predict.py [--policies 200]

The bytes are those of a traced step of a narrow ViT; the prices of its layers are random. Each policy is
predicted once, and no two are equal. `mixed`: as a search makes them, each layer with its own settings, by
name. `uniform`: one rule per tag. `derived`: as `mixed`, with `store: derive`. Beside each time: the time of
the same prediction for settings that are already matched to layers.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from common import append, spread
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import mesa_tune as mt
from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.entries import Derivation, Option, above_one_bit, full_grid

BLOCKS = 30
BATCHES = 5
KINDS = ("mixed", "uniform", "derived")


def model() -> nn.Module:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "num_labels": 10,
    }
    return ViTForImageClassification(
        ViTConfig(**sizes, num_hidden_layers=BLOCKS, image_size=64, patch_size=8)
    )


def batch(batch_size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch_size, 3, 64, 64), "labels": torch.arange(batch_size) % 10}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    value: Tensor = model(**batch).loss
    return value


def priced(profile: mt.Profile, chance: random.Random) -> mt.Profile:
    """Return `profile` with random prices for the full grid."""

    def options(grid: Iterable[LayerSettings]) -> Iterator[Option]:
        sensitivity = 10 ** chance.uniform(-6, -1)
        for settings in grid:
            error = sensitivity / (settings.level - 1) ** 2
            errors = tuple(error * chance.uniform(0.5, 1.5) for _ in range(BATCHES))
            yield Option(settings, 0, error, error, errors, True, 0.01, 0.01)

    exact = Option(EXACT, 0, 0.0, 0.0, (0.0,), True, 0.0, 0.0)
    layers = tuple(
        replace(layer, options=(exact, *options(full_grid())), call_ms=0.01) for layer in profile.layers
    )
    derivations = tuple(
        Derivation(group, span.layers, span.sources, tuple(options(above_one_bit(full_grid()))))
        for span in profile.timeline.kept
        for group in dict.fromkeys(group for group in profile.groups if set(group) & set(span.sources))
    )
    times = {"step_ms": 10.0, "routing_ms": 1.0}
    return replace(
        profile, layers=layers, derivations=derivations, interaction=((1, 0.1), (2, 0.01)), **times
    )


def policies(profile: mt.Profile, kind: str, count: int, chance: random.Random) -> list[mt.Policy]:
    """Return `count` different policies."""
    grid = [replace(settings, store="derive") if kind == "derived" else settings for settings in full_grid()]
    if kind == "uniform":
        sizes = iter(range(16, 16 + 8 * count, 8))
        return [
            mt.Policy.uniform(level=chance.choice((4, 16, 256)), group_size=next(sizes)) for _ in range(count)
        ]
    return [
        mt.Policy.from_assignments(
            (layer.tag, layer.index, layer.name, chance.choice([EXACT, *grid])) for layer in profile.layers
        )
        for _ in range(count)
    ]


def times(profile: mt.Profile, chosen: list[mt.Policy]) -> dict[str, float]:
    """Return the median milliseconds and quartiles of one prediction each, and of its part after matching."""
    whole, matched = [], []
    for policy in chosen:
        start = time.perf_counter()
        predicted = profile.predict(policy)
        whole.append(1e3 * (time.perf_counter() - start))
        assignment = profile.assignment(policy)
        start = time.perf_counter()
        again = profile.predict_assignment(assignment)
        matched.append(1e3 * (time.perf_counter() - start))
        assert again == predicted
    found = spread(whole)
    return {"ms": found.median, "low": found.low, "high": found.high, "matched_ms": spread(matched).median}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", type=int, default=200)
    count = parser.parse_args().policies
    chance = random.Random(0)
    profile = priced(mt.profile(mt.Workload(model, batch, loss, batch_size=8), options=[]), chance)
    rows = []
    for kind in KINDS:
        row = {"kind": kind, **times(profile, policies(profile, kind, count, chance))}
        rows.append(row)
        print(
            f"{kind:8} {row['ms']:6.2f} ms ({row['low']:.2f} to {row['high']:.2f}), "
            f"matched {row['matched_ms']:.2f} ms"
        )
    shape = {
        "layers": len(profile.layers),
        "spans": len(profile.timeline.kept),
        "slots": len(profile.timeline.slots),
    }
    result = {"subject": "predict", **shape, "policies": count, "rows": rows}
    print(f"{shape}\nappended to {append('predict', result)}")


if __name__ == "__main__":
    main()
