"""A profile made up for tests: blocks of norm, q, k, v (one shared input), relu and fc2, then a loss.

Small enough for brute force, with everything that makes a plan hard: shared tensors, a ReLU that keeps a
mask while its neighbour keeps the same storage, a layer stored by hooks, a tensor too small to encode,
errors over many orders of magnitude, and a peak in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from mesa_tune.policy.settings import EXACT, LayerSettings
from mesa_tune.profiles.entries import Derivation, LayerEntry, Option, TensorEntry, Tie
from mesa_tune.profiles.own_noise import ParameterNoise
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.timeline.memory_model import SavedSpan, SizePair, Slot, Timeline, Work
from mesa_tune.profiles.timeline.packed_sizes import settings_bytes

GRID = tuple(
    LayerSettings(level=1 << bits, group_size=group)
    for bits, group in product((1, 2, 3, 4, 6, 8), (64, 256, 1024))
)
COARSE = tuple(LayerSettings(level=level) for level in (4, 16, 256))
NORM, DERIVING = "blocks.0.norm", ("blocks.0.q", "blocks.0.k", "blocks.0.v")
TOKENS = 64
ITEM = 4


class _Layer(NamedTuple):
    """A layer to be made: the tensor that it keeps, by name, and that tensor's elements a token."""

    name: str
    tag: str
    tensor: str
    width: int


def synthetic_profile(
    blocks: int = 2,
    *,
    width: int = 32,
    batch_size: int = 8,
    grid: Sequence[LayerSettings] = GRID,
    seed: int = 0,
    joint: float = 1.5,
    known: bool = True,
) -> Profile:
    """A whole, consistent profile of `blocks` blocks; `known` False leaves the gradient errors out."""
    layers = list(_layers(blocks, width))
    timeline = _timeline(layers, batch_size)
    tensors = list(_tensors(layers, batch_size))
    chance = np.random.default_rng(seed)
    return Profile(
        model=None,
        fingerprint=None,
        layers_fingerprint="5e7",
        device="cpu",
        autocast=None,
        batch_size=batch_size,
        seed=seed,
        torch="2.13.0",
        partial=False,
        static_bytes=timeline.at().static,
        saved_bytes=timeline.saved_bytes({}),
        peak_bytes=timeline.peak_bytes({}),
        step_ms=40.0,
        routing_ms=0.0,
        parameters=(ParameterNoise("blocks.0.q.weight", 1000, 1.0), ParameterNoise("head.bias", 10, 0.1)),
        tensors=tuple(tensors),
        layers=tuple(
            _entry(layer, layers, tensors, grid, float(10 ** chance.uniform(-4, -1)), known)
            for layer in layers
        ),
        timeline=timeline,
        ties=tuple(
            Tie((f"blocks.{n}.q", f"blocks.{n}.k", f"blocks.{n}.v"), (joint,) * (len(grid) + 1))
            for n in range(blocks)
        ),
    )


def _layers(blocks: int, width: int) -> Iterator[_Layer]:
    for n in range(blocks):
        yield _Layer(f"blocks.{n}.norm", "layernorm", f"x{n}", width)
        yield from (_Layer(f"blocks.{n}.{name}", "fc", f"normed{n}", width) for name in "qkv")
        yield _Layer(f"blocks.{n}.relu", "relu", f"hidden{n}", 4 * width)
        yield _Layer(f"blocks.{n}.fc2", "fc", f"hidden{n}", 4 * width)
    yield _Layer("sin.0", "other", "angles", width)
    yield _Layer("head", "fc", "pooled", 1)
    yield _Layer("loss.cross_entropy.0", "loss", "logits", width)


def _elements(layer: _Layer, batch_size: int) -> int:
    return batch_size * TOKENS * layer.width if layer.name != "head" else batch_size * 16


def _keepers(layers: Iterable[_Layer]) -> dict[str, list[_Layer]]:
    found: dict[str, list[_Layer]] = {}
    for layer in layers:
        found.setdefault(layer.tensor, []).append(layer)
    return found


def _timeline(layers: list[_Layer], batch_size: int) -> Timeline:
    sizes = (batch_size, batch_size // 2)

    def pair(count: Callable[[int], int]) -> SizePair:
        return count(sizes[0]), count(sizes[1])

    def slot(layer: _Layer, phase: str) -> Slot:
        def work(batch: int) -> int:
            return ITEM * _elements(layer, batch) // 4

        def decode(batch: int) -> int:
            return work(batch) + ITEM * _elements(layer, batch) // (16 if phase == "forward" else 8)

        return Slot(layer.name, phase, Work.of(pair(work), pair(decode)))

    order = {layer.name: place for place, layer in enumerate(layers)}
    last = 2 * len(layers)
    slots = [slot(layer, "forward") for layer in layers]
    slots += [slot(layer, "backward") for layer in reversed(layers)]
    slots.append(Slot(None, "step", Work.of((50_000, 50_000), (50_000, 50_000))))
    kept = [SavedSpan("always", (), (64, 64), 1, len(layers) - 1, len(layers))]
    for keepers in _keepers(layers).values():
        names = tuple(layer.name for layer in keepers)
        first, end = order[names[0]], last - 1 - order[names[0]]
        count = pair(lambda batch, layer=keepers[0]: _elements(layer, batch))  # type: ignore[misc]
        kept.append(SavedSpan("plain", names, (ITEM * count[0], ITEM * count[1]), 1, first, end))
        coded = tuple(layer.name for layer in keepers if layer.tag != "relu")
        kept.append(SavedSpan("coded", coded, count, ITEM, order[coded[0]], last - 1 - order[coded[0]]))
        if coded != names:
            kept.append(SavedSpan("side", names[:1], (count[0] // 8, count[1] // 8), 1, first, end))
    static = {"weights": (240_000, 240_000), "batch": (60_000, 40_000)}
    return Timeline(sizes, static, tuple(slots), tuple(kept), hooked=("sin.0",))


def _tensors(layers: list[_Layer], batch_size: int) -> Iterator[TensorEntry]:
    for number, keepers in enumerate(_keepers(layers).values()):
        elements = _elements(keepers[0], batch_size)
        names = tuple(layer.name for layer in keepers)
        shape = (batch_size, elements // batch_size)
        yield TensorEntry(number, names[0], names, shape, "float32", ITEM * elements)


def _entry(
    layer: _Layer,
    layers: list[_Layer],
    tensors: list[TensorEntry],
    grid: Sequence[LayerSettings],
    sensitivity: float,
    known: bool,
) -> LayerEntry:
    tensor = next(tensor for tensor in tensors if layer.name in tensor.layers)
    elements = tensor.bytes // ITEM
    options = [_option(layer, settings, elements, sensitivity, known) for settings in (*grid, EXACT)]
    same_tag = [other.name for other in layers if other.tag == layer.tag]
    return LayerEntry(
        name=layer.name,
        tag=layer.tag,
        index=same_tag.index(layer.name),
        module=layer.name.rsplit(".", 1)[0],
        shape=tensor.shape,
        dtype="float32",
        bytes=tensor.bytes,
        own_bytes=tensor.bytes if tensor.owner == layer.name else 0,
        shared_with=tuple(name for name in tensor.layers if name != layer.name),
        options=tuple(options),
        call_ms=0.0,
        shares=((0, 1.5),),
    )


def _option(layer: _Layer, settings: LayerSettings, elements: int, sensitivity: float, known: bool) -> Option:
    if settings.exact:
        return Option(settings, ITEM * elements, 0.0, 0.0, (0.0,), True, 0.0, 0.0)
    lossless = layer.tag == "relu" or elements <= 4096
    rounding = (1 + math.log2(settings.group_size or 1) / 10) / (settings.level - 1) ** 2
    error = 0.0 if lossless else sensitivity * rounding * (1.6 if settings.level < 8 else 1.0)
    size = elements // 8 if layer.tag == "relu" else settings_bytes(elements, settings)
    # The first batch screens; errors are half of the noise.
    ratios = (2 * error, 1.8 * error, 2.2 * error) if known else ()
    shown = error if known else None
    return Option(settings, size, rounding, shown, ratios, known, elements * 1e-6, elements * 5e-7)


def noisy(profile: Profile, noise: float = 0.5) -> Profile:
    """The profile with the noise of the minibatch, and layers that interact at 2 bits."""
    return replace(profile, gradient_noise=noise, interaction=((1, 0.5), (2, 0.3)))


def is_sorted(values: Sequence[float]) -> bool:
    """True if no value is below the one before it."""
    return all(low <= high for low, high in pairwise(values))


def deriving(profile: Profile, factor: float) -> Profile:
    """q, k and v can derive from the norm, whose error is then `factor` times its own; with temporaries."""
    own = profile.layer(NORM).options
    compressing = (one for one in own if not one.settings.exact)
    options = tuple(one.times(factor) for one in compressing)
    derivation = Derivation((NORM,), DERIVING, (NORM,), options)
    return replace(profile, timeline=_linked(profile.timeline), derivations=(derivation,))


def _linked(timeline: Timeline) -> Timeline:
    def kept(item: SavedSpan) -> SavedSpan:
        return replace(item, sources=(NORM,)) if item.kind == "coded" and item.layers == DERIVING else item

    def slot(one: Slot) -> Slot:
        exact, (large, small) = one.once.live[:2]
        return replace(one, once=Work.of(exact, (large, small), (large + 3000, small + 1500)))

    return replace(timeline, kept=tuple(map(kept, timeline.kept)), slots=tuple(map(slot, timeline.slots)))
