"""`Conversion`: the state that all modules of one converted model share: policy, settings, rounding noise.

What is hard is when the settings of a layer become final. Until a first forward has ended, calls of functions
have no index, and the finest settings apply. The backward of that forward may run parts of it again
(checkpointing), and these must save the same tensors. So final settings apply from the next forward on. If
the first forward met somebody else's saved-tensor hooks, or a part without gradients (`waits`), they also
wait for a backward.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.codecs import Spec
from mesa_tune.compiling import constant_result
from mesa_tune.conversion.layers import Catalog
from mesa_tune.engine.cache import CallCache
from mesa_tune.engine.function import Memories
from mesa_tune.engine.observer import watch
from mesa_tune.engine.registry import StaticTensors, registry
from mesa_tune.engine.routing import inside_backward, state
from mesa_tune.notice import warn_once
from mesa_tune.ops import NOISE_STEP, as_int64
from mesa_tune.policy import Policy
from mesa_tune.policy.rules import MODULE

MISSING_AFTER = 20
"""Forwards after which a layer that has not run is called missing: models may skip layers at random."""

_CPU = torch.device("cpu")
_GRADIENTS = (
    "mesa-tune: gradients of an earlier backward are alive in the forward, which the budget of mt.auto does "
    "not count: call zero_grad() before the forward, or give mt.auto the accumulation= of the training"
)


class _Entries:
    """How often `compress_saved` was entered in this process, and whether it does nothing now (`off`)."""

    number = 0
    off = False


entries = _Entries()


class Conversion:
    """The policy of one model, its layers' settings, the noise keys, and the tensors that are never encoded.

    `first`: settings are not final yet. `ended`: a forward has ended. `unseen`: a part of the model ran
    without gradients, so its layers are unknown. `changed`: the final settings differ from the first. `owed`:
    outermost modules that ran without gradients since the last forward began. `excluded`: names of modules
    whose own layers stay exact. `watched`: in so many more outermost forwards, gradients of earlier steps are
    warned of, because the policy was planned for steps without them.
    """

    def __init__(
        self,
        policy: Policy,
        catalog: Catalog,
        seed: int,
        min_elements: int,
        excluded: frozenset[str] = frozenset(),
    ) -> None:
        self.policy = policy
        self.catalog = catalog
        self.min_elements = min_elements
        self.excluded = excluded
        self.keys = {_CPU: torch.tensor([_mixed(seed)], dtype=torch.int64)}
        self.specs: dict[str, Spec | None] = {}
        self.calls = CallCache()
        self.static = StaticTensors()
        self.derives = any(dict(rule.keys).get("store") == "derive" for rule in policy.rules)
        self.tiles = any(rule.tag != MODULE and rule.tiles for rule in policy.rules)
        self.producers: set[str] = set()
        self.memories: dict[str, Memories] = {}
        self.first = True
        self.changed = False  # an argument of a constant of traced code, which is then compiled again
        self.ended = False
        self.unseen = False
        self.waits = False
        self.backwards = watch.backwards
        self.owed = 0
        self.watched = 0
        self.forwards = 0

    def restart(self, seed: int) -> None:
        """Start as a new conversion with this seed would, but with the cached calls."""
        for key in self.keys.values():
            key.fill_(_mixed(seed))
        self.static.clear()
        for memories in self.memories.values():
            memories.clear()
        self.ended = self.unseen = self.waits = False

    def begin(self, batch: Sequence[Tensor], root: nn.Module | None = None) -> None:
        """Note that an outermost forward of `root` begins: advance the forward number, and file its batch."""
        for key in self.keys.values():
            key.add_(NOISE_STEP)
        if torch.compiler.is_compiling():
            return
        if self.first and self.ended and not (self.waits and self.backwards == watch.backwards):
            self.first = False
            self.changed = self._make_final()
        self.forwards += 1
        if self.forwards == MISSING_AFTER and self.catalog.skipped:
            for text in self.catalog.unmatched(self.policy):
                warn_once(text)
        if self.watched and root is not None:
            self._watch_gradients(root)
        registry.clear()
        self.owed = 0
        self.static.purge()
        self.static.root = root
        self.static.add(batch)

    def _watch_gradients(self, root: nn.Module) -> None:
        if not root.training or inside_backward():
            return
        self.watched -= 1
        if any(parameter.is_leaf and parameter.grad is not None for parameter in root.parameters()):
            self.watched = 0
            warn_once(_GRADIENTS)

    def end(self) -> None:
        """Note that an outermost forward has ended: every layer that ran with gradients is in the catalog."""
        if torch.compiler.is_compiling():
            if self.first and self._make_final():
                self.first, self.changed = False, True
            return
        self.static.root = None
        self.ended = True
        if not self.unseen:
            self._assign_indices()

    def note_without_gradients(self, inside: bool) -> None:
        """Note a module that runs without gradients, perhaps to run again in backward (reentrant checkpoint).

        If it is `inside` an outermost forward, its layers stay unseen. If it is outermost itself, the forward
        number has not advanced for it yet.
        """
        if torch.compiler.is_compiling():
            return
        if inside:
            self.unseen = self.waits = True
        else:
            self.owed += 1

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Note no module that the body runs without gradients: nobody runs it again in backward."""
        before = self.unseen, self.waits, self.owed
        try:
            yield
        finally:
            self.unseen, self.waits, self.owed = before

    def spec(self, layer: str, tag: str, module: str) -> Spec | None:
        """Return how `layer` stores what it saves; None: as PyTorch does."""
        if torch.compiler.is_compiling():
            constant: Spec | None = self._constant_spec(layer, tag, module, self.changed)
            return constant
        return self._cached_spec(layer, tag, module)

    @constant_result
    def _constant_spec(self, layer: str, tag: str, module: str, changed: bool) -> Spec | None:
        return self._cached_spec(layer, tag, module)

    def _cached_spec(self, layer: str, tag: str, module: str) -> Spec | None:
        return self.specs[layer] if layer in self.specs else self._resolve(layer, tag, module)

    def _resolve(self, layer: str, tag: str, module: str) -> Spec | None:
        if tag == "attention":
            self._bind_attention()
        index = self.catalog.index(layer, tag, module)
        if self.catalog.module(layer) in self.excluded:
            return self.specs.setdefault(layer, None)
        spec = Spec.of(self.policy.settings(tag, index, layer), self.min_elements)
        if spec is not None and self.derives:
            # The first forward shows which outputs other layers rematerialize. A search knows it already.
            known = self.policy.header.producers
            exposes = self.first if known is None else layer in known
            spec = spec._replace(exposes=exposes or layer in self.producers)
        if self.tiles and tag == "fc":
            spec = (spec or Spec.plain(self.min_elements))._replace(feeds_tiled=True)
        self.specs[layer] = spec
        return spec

    def _bind_attention(self) -> None:
        bound = self.policy.bind_attention()
        if bound is not self.policy and not any(rule.tag == "attention" for rule in self.policy.rules):
            self.policy = bound
            for text in bound.warnings:
                warn_once(text)

    def _assign_indices(self) -> None:
        for text in self.catalog.assign_indices(self.policy):
            warn_once(text)

    @constant_result
    def _make_final(self) -> bool:
        """Resolve the settings of all layers again, by their indices; return whether any changed."""
        before = dict(self.specs)
        self._assign_indices()
        self.specs.clear()
        changed = [self._resolve(name, self.catalog.tag(name), "") != spec for name, spec in before.items()]
        if True in changed:
            self.calls.clear()
        return True in changed

    def key(self, device: torch.device) -> Tensor:
        """Return the one-element int64 tensor that rounding noise depends on, on `device`."""
        if device in self.keys:
            return self.keys[device]
        key = self.keys[_CPU].to(device, non_blocking=True)
        if not torch.compiler.is_compiling():
            self.keys[device] = key
        return key

    def recompute_spec(self, module: str) -> Spec | None:
        """Return how `module` stores its inputs if it runs again in backward; None if it does not."""
        settings = None if module in self.excluded else self.policy.recomputed(module)
        return None if settings is None else Spec.of(settings, self.min_elements)

    def note(self, layer: str) -> None:
        """Note that another layer rematerializes the output of `layer`, which exposes what that takes."""
        if torch.compiler.is_compiling():
            self._constant_note(layer)
        else:
            self.producers.add(layer)

    @constant_result
    def _constant_note(self, layer: str) -> bool:
        self.producers.add(layer)
        return True

    def memory(self, layer: str) -> Memories | None:
        """Return what codecs remember of `layer` from step to step; None in traced code."""
        return None if torch.compiler.is_compiling() else self.memories.setdefault(layer, {})

    def note_replaced_parameters(self, module: nn.Module) -> None:
        """Note tensors by which `torch.func.functional_call` has replaced parameters of `module`."""
        replacements = replaced_parameters(module)
        if not torch.compiler.is_compiling():
            self.static.add(replacements)
        elif state.frames:  # those of the outermost module are in its batch already
            state.frames[-1].batch.extend(replacements)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "static": StaticTensors(), "calls": CallCache()}


def replaced_parameters(module: nn.Module) -> list[Tensor]:
    """Return tensors that are no parameters, but have replaced parameters of `module`."""
    parameters: Iterator[Tensor] = module.parameters()
    return [tensor for tensor in parameters if not isinstance(tensor, nn.Parameter)]


def _mixed(seed: int) -> int:
    return as_int64(seed * 0xBF58476D1CE4E5B9 + rank_offset())


def rank_offset() -> int:
    """Return the number that is added to a key, so that two ranks round differently."""
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if initialized else 0
    return as_int64((rank + 1) * 0x94D049BB133111EB)
