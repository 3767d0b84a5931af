"""Prices of modules that run again in backward from their packed inputs (`store: recompute`).

What is hard: each error takes a whole step, and a model has many modules. So of modules that are alike the
first and the last are measured, on one batch and at two levels. In the others, on other batches and at other
levels, errors are in proportion to the sum of those of the layers inside (on a digits ViT, the standard
deviation of their ratio is 0.1 of it from batch to batch, where errors vary by 0.45), at other levels to a
power of it. For rounding that changes which units of a
ReLU are on adds an error in proportion to the step of rounding, not to its square: in a small ResNet, 256
levels erred 13 to 24 times more than a square predicts from 16 levels. All else is seen by hooks during steps
that are taken anyway.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from mesa_tune.codecs import Spec
from mesa_tune.conversion.layers import modules_by_name
from mesa_tune.conversion.model import conversion_of
from mesa_tune.conversion.recompute import input_row
from mesa_tune.errors import RunError
from mesa_tune.measure.errors.derivation import continued
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.measure.errors.recorded import squared_norm, stored
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import MIN_ELEMENTS, LayerSettings
from mesa_tune.profiles.entries import REFERENCE_GROUP, LayerEntry, Option, above_one_bit, kind
from mesa_tune.profiles.intervals import Ratios
from mesa_tune.profiles.other_entries import ModuleEntry
from mesa_tune.profiles.own_noise import Floats, GradientError, Shares, shares_of, summed
from mesa_tune.profiles.profile import Profile
from mesa_tune.profiles.timeline.packed_sizes import settings_bytes, within
from mesa_tune.workload.clock import Clock, Mark

_MEASURED_BITS = 4
_LARGEST_POWER = 1.5


@dataclass
class _Seen:
    """What hooks saw of one block: its calls, the inputs of the first one, and whether it can run again."""

    calls: list[tuple[Mark, Mark]] = field(default_factory=list)
    begin: Mark | None = None
    exact_bytes: int = 0
    packed: list[tuple[int, int, int, int]] = field(default_factory=list)
    rounding: dict[LayerSettings, tuple[float, float, float]] = field(default_factory=dict)
    returns_gradients: bool = True


@dataclass
class BlockWatch:
    """Watches the modules `names` of a model in plain steps; `options`: settings of the packed inputs."""

    model: nn.Module
    names: Sequence[str]
    clock: Clock
    options: Sequence[LayerSettings]
    seen: dict[str, _Seen] = field(default_factory=dict)
    forwards: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the steps of the body."""
        handles, modules = [self.model.register_forward_pre_hook(self._count)], modules_by_name(self.model)
        for name in self.names:
            block, seen = modules[name], self.seen.setdefault(name, _Seen())
            handles.append(block.register_forward_pre_hook(partial(self._begin, seen), with_kwargs=True))
            handles.append(block.register_forward_hook(partial(self._end, seen)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def _is_plain(self) -> bool:
        return conversion_of(self.model) is None

    def _count(self, *_: Any) -> None:
        self.forwards += self._is_plain

    def _begin(self, seen: _Seen, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_plain:
            return
        if not seen.calls:
            self._inspect(seen, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
        seen.begin = self.clock.now()

    def _end(self, seen: _Seen, _: nn.Module, __: Any, output: Any) -> None:
        if not self._is_plain:
            return
        assert seen.begin is not None
        seen.calls.append((seen.begin, self.clock.now()))
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        seen.returns_gradients &= any(tensor.requires_grad for tensor in tensors)

    def _inspect(self, seen: _Seen, tensors: Sequence[Tensor]) -> None:
        """Note sizes of the inputs, and what rounding does to those that are packed."""
        packed = [one for one in tensors if one.requires_grad and one.numel() > MIN_ELEMENTS]
        seen.exact_bytes = sum(one.nbytes for one in tensors if all(one is not other for other in packed))
        seen.packed = [(one.numel(), one.element_size(), one.shape[0], input_row(one)) for one in packed]
        for settings in self.options if packed else ():
            seen.rounding[settings] = _rounding([one.detach() for one in packed], settings)

    def rerunnable(self) -> Iterator[str]:
        """Yield the blocks that ran once in each forward, take a tensor that is packed, and return one."""
        for name, seen in self.seen.items():
            if seen.packed and seen.returns_gradients and len(seen.calls) == self.forwards:
                yield name

    def likeness(self, name: str) -> Any:
        """Return what modules have in common that are alike: class, parameters, and inputs."""
        module, seen = modules_by_name(self.model)[name], self.seen[name]
        shapes = [(part, parameter.shape) for part, parameter in module.named_parameters()]
        return type(module), tuple(shapes), seen.exact_bytes, tuple(seen.packed)

    def forward_ms(self, name: str, forwards: int) -> float:
        """Return the milliseconds of the block's forward in a step of so many forwards."""
        marks = [mark for call in self.seen[name].calls for mark in call]
        return forwards * median(self.clock.ms(marks)[::2])


def _rounding(tensors: Sequence[Tensor], settings: LayerSettings) -> tuple[float, float, float]:
    """Return the relative squared error of rounding, and the milliseconds of encoding and of decoding."""
    change = size = encode = decode = 0.0
    spec, seed = Spec.of(settings, MIN_ELEMENTS), torch.zeros(1, dtype=torch.int64)
    assert spec is not None
    for tensor in tensors:
        copy, encode_ms, decode_ms = stored(tensor, spec.within(input_row(tensor)), seed, tries=2)
        change, size = change + squared_norm(copy - tensor), size + squared_norm(tensor)
        encode, decode = encode + encode_ms, decode + decode_ms
    return change / size if size else 0.0, encode, decode


def module_options(options: Sequence[LayerSettings]) -> list[LayerSettings]:
    """Return the settings to price for modules: plain ones of more than 1 bit in reference groups."""
    plain = [option for option in options if kind(option) == kind(LayerSettings())]
    chosen = [option for option in above_one_bit(plain) if option.group_size == REFERENCE_GROUP]
    return [replace(option, store="recompute") for option in chosen]


class ModulePricing:
    """Prices of those of `modules` that `watch` saw.

    Each runs again in so many slices. Their errors are those of one.
    """

    def __init__(self, watch: BlockWatch, modules: Mapping[str, int]) -> None:
        self.watch, self.slices = watch, modules
        reference = min(watch.options, key=lambda option: abs(option.bits - _MEASURED_BITS), default=None)
        finest = max(watch.options, key=lambda option: option.level, default=None)
        self.tried = tuple(filter(None, (reference, finest)))
        names = [name for name in watch.rerunnable() if name in modules] if watch.options else []
        self.alike: dict[Any, list[str]] = defaultdict(list)
        for name in names:
            self.alike[watch.likeness(name)].append(name)
        self.errors: dict[str, dict[LayerSettings, GradientError]] = {}
        self.shares: dict[str, Shares] = {}

    def measure(self, joint: JointError, draw: int) -> None:
        """Measure errors of modules that can run again, on the batch `draw`, the first that prices."""
        for names in self.alike.values():
            for name in _ends(names):
                measured: dict[LayerSettings, GradientError] = {}
                for option in self.tried:
                    squares = _squares(joint, Policy.parse("").rerunning({name: option}), draw)
                    if squares is None:
                        break
                    measured[option] = joint.relative(squares, draw)
                    if joint.own is not None:
                        self.shares.setdefault(name, shares_of(joint.own, squares))
                else:
                    self.errors[name] = measured

    def entries(self, priced: Profile, forwards: int) -> Iterator[ModuleEntry]:
        """Yield the prices. `priced`: has the errors of layers; `forwards`: number of them in a step.

        A module of which one that is alike could not run again has none.
        """
        for names in self.alike.values():
            like = {name: name for name in _ends(names) if name in self.errors}
            if like:
                like |= dict.fromkeys(names[1:-1], next(iter(like)))
            for name in names:
                if name in like:
                    yield self._entry(name, like[name], priced, forwards)

    def _entry(self, name: str, like: str, priced: Profile, forwards: int) -> ModuleEntry:
        """Return the price of a module whose errors are in proportion to those of one that was measured."""
        seen, errors = self.watch.seen[name], self.errors[like]
        reference = self.tried[0]
        sizes = self._sizes(like, self.tried, priced)
        power = _power([each.ratio for each in errors.values()], sizes) if len(errors) > 1 else 1.0
        own = self._sizes(name, (reference,), priced)[0]
        factor = own / sizes[0] if sizes[0] > 0 else 1.0
        measured = {
            option: GradientError(factor * one.error, factor * one.ratio) for option, one in errors.items()
        }
        options = [self._priced(name, option, priced, power, measured) for option in self.watch.options]
        if like != name:
            options = [replace(option, measured=False) for option in options]
        shares = self.shares.get(name, ()) if like == name else _shares_inside(name, reference, priced)
        ms = self.watch.forward_ms(name, forwards)
        return ModuleEntry(name, _input_bytes(seen, None), ms, tuple(options), shares)

    def _priced(
        self,
        name: str,
        settings: LayerSettings,
        priced: Profile,
        power: float,
        measured: Mapping[LayerSettings, GradientError],
    ) -> Option:
        """Return the price of `settings`, by batch in proportion to a power of those of layers inside."""
        reference = self.tried[0]
        size, tried = self._sizes(name, (settings, reference), priced)
        scale = (size / tried) ** power if settings not in measured and min(size, tried) > 0 else 1.0
        error = measured.get(settings, measured[reference])
        error = GradientError(scale * error.error, scale * error.ratio)
        option = self._option(name, settings, error, measured=settings in measured)
        own = _own(name, settings, priced)
        return continued(option, own) if own and _own(name, reference, priced) else option

    def _sizes(self, name: str, options: Sequence[LayerSettings], priced: Profile) -> list[float]:
        """Return the sums of the errors of the layers inside a module under each option, on the first batch.

        Where one is unknown, they are those of quantization noise.
        """
        own = [_own(name, one, priced) for one in options]
        if all(own):
            return [sum(ratios[0] for ratios in layers) for layers in own]
        return [(one.level - 1) ** -2 for one in options]

    def _option(self, name: str, settings: LayerSettings, error: GradientError, *, measured: bool) -> Option:
        seen = self.watch.seen[name]
        tensor_error, encode_ms, decode_ms = seen.rounding[settings]
        # Inputs whose packing changes nothing stayed exact: the module computes indices from them.
        packed = error.error > 0
        return Option(
            settings=replace(settings, tile=self.slices[name]),
            bytes=_input_bytes(seen, settings if packed else None),
            tensor_error=tensor_error if packed else 0.0,
            gradient_error=error.error,
            ratios=(error.ratio,),
            measured=measured,
            encode_ms=encode_ms if packed else 0.0,
            decode_ms=decode_ms if packed else 0.0,
            screened=False,
        )


def _squares(joint: JointError, policy: Policy, draw: int) -> Floats | None:
    """Return ‖ĝ − g‖² by part on the batch `draw`; None if the module of the policy cannot run again."""
    try:
        squares = joint.squares(policy, draw, 0)
    except (RunError, CheckpointError):
        return None
    return squares if np.isfinite(squares).all() else None


def _power(ratios: Sequence[float], sizes: Sequence[float]) -> float:
    """Return the power of the layers' ratios (`sizes`) that a module's ratios follow from level to level."""
    if min(*ratios, *sizes) <= 0 or sizes[-1] >= sizes[0]:
        return 1.0
    return min(math.log(ratios[0] / ratios[-1]) / math.log(sizes[0] / sizes[-1]), _LARGEST_POWER)


def _ends(names: Sequence[str]) -> list[str]:
    """Return the first and the last name, once if they are the same."""
    return list(dict.fromkeys((names[0], names[-1])))


def _inside(name: str, option: LayerSettings, priced: Profile) -> Iterator[tuple[LayerEntry, Option]]:
    """Yield the layers inside a module, each alone, with their prices under settings like `option`."""
    plain = replace(option, store="quantize")
    for layer in priced.layers:
        like = layer.like(plain) if layer.name.startswith(f"{name}.") else None
        if like is not None:
            yield layer, like


def _own(name: str, option: LayerSettings, priced: Profile) -> list[Ratios]:
    """Return the ratios by batch of the layers inside a module, each alone, under settings like `option`."""
    ratios = (like.price_ratios for _, like in _inside(name, option, priced))
    return [each for each in ratios if any(each)]


def _shares_inside(name: str, option: LayerSettings, priced: Profile) -> Shares:
    """Return on which parameters the errors of the layers inside a module fall, together."""
    ratios = [(layer.shares, like.price_ratios[0]) for layer, like in _inside(name, option, priced)]
    total = sum(ratio for _, ratio in ratios)
    own = summed(ratios, len(priced.parameters)) / total if total > 0 else np.zeros(0)
    return tuple((int(part), float(own[part])) for part in np.flatnonzero(own))


def _input_bytes(seen: _Seen, settings: LayerSettings | None) -> int:
    """Return the bytes of the saved inputs, packed under `settings` or exact."""
    total = seen.exact_bytes
    for elements, itemsize, samples, row in seen.packed:
        exact = elements * itemsize
        used = None if settings is None else within(settings, row)
        total += exact if used is None else min(exact, settings_bytes(elements, used, itemsize, samples))
    return total
