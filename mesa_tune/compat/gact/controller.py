"""GACT's controller: what autograd keeps of a model and its loss, compressed from install to uninstall."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from mesa_tune import routing
from mesa_tune.catalog import Catalog, named_layers
from mesa_tune.codecs.mixed import allocate
from mesa_tune.compat.gact import conf
from mesa_tune.compat.gact.sensitivity import Estimate
from mesa_tune.conversion import Conversion, conversion_of, convert, revert
from mesa_tune.functional.table import own_route
from mesa_tune.notice import warn_once
from mesa_tune.policy import Policy
from mesa_tune.policy_rules import Rule
from mesa_tune.profiler.preserve import random_states_kept
from mesa_tune.profiler.trace import observing
from mesa_tune.settings import MIN_ELEMENTS

MOST_BITS = 8


class Controller:
    """Compresses what `model` and the loss keep for backward, from `install_hook()` to `uninstall_hook()`.

    `iterate(get_grad)` belongs after every step. With `auto_prec` it measures how much each layer matters, at
    the first call and every `adapt_interval` ones, by one run of `get_grad` (a forward and a backward), and
    places `bit` bits an element on average. Layers go by name. `bits` has the bits of each layer adapted.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config = dataclasses.replace(conf.config)
        self.iter = 0
        self.bits: dict[str, int] = {}
        self.policy = self._uniform()
        self._entered: ExitStack | None = None
        self._losses: Conversion | None = None
        for name in conf.unknown_changes(self.config):
            warn_once(f"mesa-tune: gact.config.{name} means nothing here.")
        if self.config.swap and self.config.compress_activation:
            warn_once(
                "mesa-tune: gact: packed tensors stay on the device: `swap` moves only what is not packed."
            )

    @property
    def compresses(self) -> bool:
        """Whether the level leaves anything to do."""
        return self.config.compress_activation or self.config.swap

    def install_hook(self) -> None:
        """From now on the model and the loss keep compressed copies. Installed twice is installed once."""
        if self.compresses and self._entered is None:
            self._apply()

    def uninstall_hook(self) -> None:
        """The model and the loss keep again what PyTorch keeps."""
        if self._entered is not None:
            self._leave()
            revert(self.model)

    def iterate(self, get_grad: Callable[[], object]) -> None:
        """An iteration has ended; `get_grad()` runs a forward and a backward when they are needed.

        Gradients, buffers and random states are afterwards as before.
        """
        if self._entered is None:
            return
        due = self.config.auto_prec and self.config.compress_activation
        if due and self.iter % self.config.adapt_interval == 0:
            self.adapt(get_grad)
        else:
            self._leave()
            self._enter()
        self.iter += 1

    def adapt(self, get_grad: Callable[[], object]) -> None:
        """Measures, and places the bits anew."""
        self._leave()
        self._enter()
        estimate = Estimate([parameter for parameter in self.model.parameters() if parameter.requires_grad])
        with _untouched(self.model), observing(estimate):
            get_grad()
        groups = [group for group in estimate.groups() if not self._drops(group.layers[0])]
        if not groups:
            raise ValueError(
                "get_grad() must run a forward and a backward of the model, but nothing was seen"
            )
        most = min(MOST_BITS, self.config.max_bit)
        errors, sizes = [group.error for group in groups], [group.size for group in groups]
        bits = allocate(errors, sizes, min(self.config.bit, most))
        pairs = list(zip(groups, bits, strict=True))
        self.bits = {layer: min(given, most) for group, given in pairs for layer in group.layers}
        self.policy = self._uniform(self._placed())
        self._leave()
        self._apply()

    def _drops(self, layer: str) -> bool:
        """Whether DropIT has `layer`: it has no bits to place."""
        conversion = conversion_of(self.model)
        spec = None if conversion is None else conversion.specs.get(layer)
        return spec is not None and spec.drop > 0

    def _placed(self) -> tuple[Rule, ...]:
        conversions = (conversion_of(self.model), self._losses)
        tags = {name: tag for one in conversions if one for tag, _, name in one.catalog.known()}
        return tuple(
            Rule.of(tags[layer], None, [layer], {"level": 2**bits}) for layer, bits in self.bits.items()
        )

    def _uniform(self, more: tuple[Rule, ...] = ()) -> Policy:
        if not self.config.compress_activation:
            return Policy.uniform(store="offload")
        bits = min(self.config.bit, MOST_BITS)
        rules = Policy.uniform(2**bits, group_size=self.config.group_size).rules
        return Policy((*rules, *more, *_dropped(self.model)))

    def _apply(self) -> None:
        convert(self.model, self.policy, seed=torch.initial_seed() + self.iter)
        self._enter()

    def _enter(self) -> None:
        """A step begins: the loss's calls are counted from 0 again."""
        if self._losses is None or self._losses.policy is not self.policy:
            self._losses = Conversion(self.policy, Catalog.empty(), torch.initial_seed(), MIN_ELEMENTS)
        self._entered = ExitStack()
        self._entered.enter_context(routing.entered(self._losses, "loss"))

    def _leave(self) -> None:
        if self._entered is not None:
            self._entered.close()
            self._entered = None


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Gradients, buffers, modes and random states of `model` are afterwards as before."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with random_states_kept():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, copy in buffers:
                buffer.copy_(copy)
        for module, mode in modes:
            module.training = mode


def _dropped(model: nn.Module) -> Iterator[Rule]:
    """Rules for the modules that DropIT has taken: they drop as before, their survivors exact."""
    for name, module in named_layers(model):
        dropiter: Any = module.__dict__.get("dropiter")
        if dropiter is None:
            continue
        if dropiter.strategy == "vrandom":
            warn_once(f"mesa-tune: {name!r} drops by magnitude under GACT: no policy can say vrandom.")
        route = own_route(module)
        names = [name] if route is not None else [f"{name}.*"]
        keys = {"drop": dropiter.gamma, "store": "exact"}
        yield Rule.of("fc" if route is None else route.tag, None, names, keys)
