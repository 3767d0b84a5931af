"""`Conversion`: what all modules of one converted model share: the policy, who stores how, the dice."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.codecs import Spec
from mesa_tune.conversion.layers import Catalog
from mesa_tune.engine.cache import CallCache
from mesa_tune.engine.function import Memories
from mesa_tune.engine.observer import watch
from mesa_tune.engine.routing import state
from mesa_tune.engine.storage import StaticTensors, registry
from mesa_tune.notice import warn_once
from mesa_tune.policy import Policy

_STEP = 0x9E3779B97F4A7C15 - 2**64  # odd: the forward number runs through all 2⁶⁴ keys
_CPU = torch.device("cpu")


class _Entries:
    """How often `compress_saved` was entered in this process."""

    number = 0


entries = _Entries()


class Conversion:
    """A policy at work on one model: settings by layer, the noise key, and what is never encoded.

    What is settled when: until a first forward has ended, a call of a function has no index, and the finest
    settings apply. Its backward may run parts of that forward again (checkpointing), and they must then save
    the same. So the final settings wait for the next forward and, if somebody's saved-tensor hooks or a part
    without gradients were met (`waits`), for a backward before it.
    """

    def __init__(self, policy: Policy, catalog: Catalog, seed: int, min_elements: int) -> None:
        self.policy = policy
        self.catalog = catalog
        self.min_elements = min_elements
        self.keys = {_CPU: torch.tensor([_mixed(seed)], dtype=torch.int64)}
        self.specs: dict[str, Spec | None] = {}
        self.calls = CallCache()
        self.static = StaticTensors()
        self.derives = any(dict(rule.keys).get("store") == "derive" for rule in policy.rules)
        self.producers: set[str] = set()
        self.memories: dict[str, Memories] = {}
        self.first = True
        self.changed = False  # settings that traced code holds: it is compiled again
        self.ended = False
        self.unseen = False
        self.waits = False
        self.backwards = watch.backwards
        self.owed = 0

    def restart(self, seed: int) -> None:
        """Begin with another seed as a new conversion would, but with the cached calls."""
        for key in self.keys.values():
            key.fill_(_mixed(seed))
        self.static.clear()
        for memories in self.memories.values():
            memories.clear()
        self.ended = self.unseen = self.waits = False

    def begin(self, batch: Sequence[Tensor], root: nn.Module | None = None) -> None:
        """An outermost forward of `root` begins: the forward number advances, and its batch becomes known."""
        for key in self.keys.values():
            key.add_(_STEP)
        if torch.compiler.is_compiling():
            return
        if self.first and self.ended and not (self.waits and self.backwards == watch.backwards):
            self.first = False
            self.changed = self._settling_changes()
        registry().clear()
        self.owed = 0
        self.static.purge()
        self.static.root = root
        self.static.add(batch)

    def end(self) -> None:
        """An outermost forward has ended: every layer that ran with gradients is known."""
        if torch.compiler.is_compiling():
            if self.first and self._settling_changes():
                self.first, self.changed = False, True
            return
        self.static.root = None
        self.ended = True
        if not self.unseen:
            self._settle()

    def passed_over(self, inside: bool) -> None:
        """A module ran without gradients, perhaps to run again in backward (reentrant checkpointing).

        Layers `inside` an outermost forward have not been seen then; one that is outermost has a forward
        number to come.
        """
        if torch.compiler.is_compiling():
            return
        if inside:
            self.unseen = self.waits = True
        else:
            self.owed += 1

    def spec(self, layer: str, tag: str, module: str) -> Spec | None:
        """How `layer` stores what it keeps; None: as PyTorch does."""
        if torch.compiler.is_compiling():
            constant: Spec | None = self._constant_spec(layer, tag, module, self.changed)
            return constant
        return self._known_spec(layer, tag, module)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _constant_spec(self, layer: str, tag: str, module: str, changed: bool) -> Spec | None:
        return self._known_spec(layer, tag, module)

    def _known_spec(self, layer: str, tag: str, module: str) -> Spec | None:
        return self.specs[layer] if layer in self.specs else self._resolve(layer, tag, module)

    def _resolve(self, layer: str, tag: str, module: str) -> Spec | None:
        if tag == "attention":
            self._bind_attention()
        index = self.catalog.index(layer, tag, module)
        settings = self.policy.settings(tag, index, layer)
        found = Spec.of(settings, self.min_elements)
        if found is not None and self.derives:
            # Who makes whose output again shows in the first forward, unless a search has said so.
            likely = self.first and (found.derive or not self.policy.is_searched)
            found = found._replace(exposes=likely or layer in self.producers)
        self.specs[layer] = found
        return found

    def _bind_attention(self) -> None:
        bound = self.policy.bind_attention()
        if bound is not self.policy and not any(rule.tag == "attention" for rule in self.policy.rules):
            self.policy = bound
            for text in bound.warnings:
                warn_once(text)

    def _settle(self) -> None:
        for text in self.catalog.settle(self.policy):
            warn_once(text)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _settling_changes(self) -> bool:
        before = dict(self.specs)
        self._settle()
        self.specs.clear()
        changed = [self._resolve(name, self.catalog.tag(name), "") != spec for name, spec in before.items()]
        if True in changed:
            self.calls.clear()
        return True in changed

    def key(self, device: torch.device) -> Tensor:
        """The one-element int64 tensor that rounding noise depends on, on `device`."""
        if device in self.keys:
            return self.keys[device]
        made = self.keys[_CPU].to(device, non_blocking=True)
        if not torch.compiler.is_compiling():
            self.keys[device] = made
        return made

    def recompute_spec(self, module: str) -> Spec | None:
        """How `module` stores its inputs if it keeps nothing else; None if it does not run again."""
        settings = self.policy.recomputed(module)
        return None if settings is None else Spec.of(settings, self.min_elements)

    def note(self, layer: str) -> None:
        """Another layer makes the output of `layer` again, so it goes on keeping what that takes."""
        if torch.compiler.is_compiling():
            self._constant_note(layer)
        else:
            self.producers.add(layer)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _constant_note(self, layer: str) -> bool:
        self.producers.add(layer)
        return True

    def memory(self, layer: str) -> Memories | None:
        """What codecs remember of `layer` from step to step; None in traced code."""
        return None if torch.compiler.is_compiling() else self.memories.setdefault(layer, {})

    def note_swapped(self, module: nn.Module) -> None:
        """Notes what `torch.func.functional_call` has put in the place of parameters of `module`."""
        given: Iterator[Tensor] = module.parameters()
        swapped = [each for each in given if not isinstance(each, nn.Parameter)]
        if not torch.compiler.is_compiling():
            self.static.add(swapped)
        elif state.frames:  # the outermost module's are among its batch
            state.frames[-1].batch.extend(swapped)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "static": StaticTensors(), "calls": CallCache()}


def _mixed(seed: int) -> int:
    mixed = (seed * 0xBF58476D1CE4E5B9 + of_rank()) % 2**64
    return _signed(mixed)


def of_rank() -> int:
    """What the rank adds to a seed: two processes round differently."""
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if known else 0
    return _signed((rank + 1) * 0x94D049BB133111EB % 2**64)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
