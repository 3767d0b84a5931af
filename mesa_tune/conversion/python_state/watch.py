"""Snapshots of the Python state of a module: its second run sees what the first one saw, and changes nothing.

What is hard is the price of a look at each run. Attributes and containers cost little, so each snapshot has
them. Copies of tensors, and of the generators that all code shares, cost much, so a snapshot has those that
an earlier run has changed. Runs 1, 2, 4, 8, … of a module are looked at in full to see which these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes

from mesa_tune.conversion.python_state.hooks import has_hooks
from mesa_tune.conversion.python_state.places import (
    GENERATOR,
    HOOK,
    ITERATOR,
    Place,
    buffers,
    contents,
    hooks,
    values,
)
from mesa_tune.conversion.python_state.search import global_generators, places_of


class Snapshot:
    """Copies of the contents of places, and of tensors that are changed in place."""

    __slots__ = ("clones", "copies", "tensors")

    def __init__(self, places: Iterable[Place]) -> None:
        self.copies: dict[Any, tuple[Place, Any]] = {}
        self.tensors: list[tuple[Tensor, int]] = []
        self.clones: dict[int, Tensor] = {}
        for place in places:
            self._add(place, deeper=True)

    def _add(self, place: Place, *, deeper: bool) -> None:
        if place.key in self.copies:
            return
        copy = place.copy(place.owner)
        self.copies[place.key] = place, copy
        for value in values(copy):
            if isinstance(value, Tensor):
                if type(value) is not nn.Parameter:
                    self.tensors.append((value, _version(value)))
            elif (inside := contents(value)) is not None and (deeper or inside.what == GENERATOR):
                self._add(inside, deeper=False)

    @property
    def places(self) -> list[Place]:
        """The places of the snapshot, those in containers too."""
        return [place for place, _ in self.copies.values()]

    @property
    def obstacle(self) -> str | None:
        """Name of a place that nobody can put back; None if there is none."""
        return next((place.what for place, _ in self.copies.values() if place.what == ITERATOR), None)

    def clone(self, wanted: Callable[[Tensor], bool]) -> None:
        """Copy the values of the tensors that are `wanted`."""
        chosen = {id(tensor): tensor for tensor, _ in self.tensors if wanted(tensor)}
        if chosen:
            with _disable_current_modes():
                self.clones = _cloned(chosen)

    def changed(self) -> list[Tensor]:
        """Return the tensors that were changed in place since."""
        return [tensor for tensor, version in self.tensors if _version(tensor) != version]

    def put(self, tensors: dict[int, Tensor] | None = None) -> None:
        """Restore the contents of all places, with other `tensors` in place of some."""
        for place, copy in self.copies.values():
            place.put(place.owner, _substituted(copy, tensors) if tensors else copy)

    def undo(self) -> None:
        """Restore the contents of all places, and the values of tensors."""
        self.put()
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for tensor in self.changed():
                if id(tensor) in self.clones:
                    tensor.copy_(self.clones[id(tensor)])

    @contextmanager
    def again(self, watch: Watch) -> Iterator[None]:
        """Run the body in the state of the snapshot, and restore the present state afterwards.

        The body changes copies of buffers, and of other tensors that the first run changed in place.
        """
        now = Snapshot((*watch.places(), *self.places))
        buffers = (each for place in watch.buffers for each in self.copies[place.key][1].values())
        tensors = {id(each): each for each in buffers if each is not None} | self.clones
        self.put(_cloned(tensors) if tensors else None)
        for place in now.places:
            if place.what == HOOK and place.key not in self.copies:
                place.owner.clear()  # a hook that the first run did not have
        try:
            yield
        finally:
            now.put()

    def difference(self, other: Snapshot) -> str | None:
        """Return what has changed since `other`; None if nothing has.

        A tensor that was made again with equal values, without a gradient, has not changed.
        """
        for key, (place, copy) in self.copies.items():
            before = other.copies.get(key)
            if before is not None and (name := _different(before[1], copy)) is not None:
                return f"{place.what} ({name!r})" if name else place.what
        changed = other.changed()
        return f"a tensor of shape {tuple(changed[0].shape)}" if changed else None


class Watch:
    """The state of `module` that can be seen. `written`: tensors that its runs change in place.

    `obstacle`: see `Snapshot`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.runs = 0
        self.written: dict[int, ref[Tensor]] = {}
        self.generators: list[Place] = []
        self.obstacle: str | None = None

    def places(self) -> list[Place]:
        """Return the places that are looked at in each run."""
        hooked = [place for one in self.below if has_hooks(one) for place in hooks(one)]
        return [*self.found, *self.buffers, *self.generators, *hooked]

    def begin(self, given: Iterable[Any] = ()) -> Snapshot:
        """Return a snapshot before the first of two runs. `given`: objects that the module is called with."""
        self.runs += 1
        full = self._is_full()
        if full:
            self._find()
        snapshot = self.now(given)
        if full:
            self.obstacle = snapshot.obstacle
        snapshot.clone(self._may_be_written if full else self._is_written)
        return snapshot

    def whole(self) -> Snapshot:
        """Return a snapshot with all that may change. Only the first one searches the code for it.

        Hooks that a forward registers, once and for all, go with the attribute that says so.
        """
        if not self.runs:
            self.runs = 1
            self._find()
        every = (place for one in self.module.modules() for place in hooks(one))
        snapshot = Snapshot((*self.found, *self.buffers, *self.generators, *every, *global_generators()))
        snapshot.clone(self._may_be_written)
        return snapshot

    def now(self, given: Iterable[Any] = ()) -> Snapshot:
        """Return a snapshot. `given`: objects that the module is called with."""
        objects = [place for value in given if (place := contents(value)) is not None]
        shared = global_generators() if self._is_full() else ()
        return Snapshot((*self.places(), *objects, *shared))

    def end(self, snapshot: Snapshot) -> None:
        """Note what the first run has changed since `snapshot`, which then forgets what it has not."""
        changed = {id(tensor): tensor for tensor in snapshot.changed()}
        self.written.update((key, ref(tensor)) for key, tensor in changed.items())
        snapshot.clones = {key: clone for key, clone in snapshot.clones.items() if key in changed}
        snapshot.tensors.clear()
        if self._is_full():
            self._note_generators(snapshot)

    def _is_full(self) -> bool:
        return self.runs & (self.runs - 1) == 0

    def _find(self) -> None:
        inside = list(self.module.modules())
        self.below = inside[1:]
        self.found = places_of(inside)
        self.buffers = [buffers(one) for one in inside if one._buffers]
        norms = (one for one in inside if isinstance(one, _BatchNorm))
        self.statistics = {id(buffer) for norm in norms for buffer in norm._buffers.values()}

    def _note_generators(self, snapshot: Snapshot) -> None:
        """Look at those generators from now on that all code shares, and that the first run has advanced."""
        watched = {place.key for place in Snapshot(self.places()).places}
        for place in global_generators():
            if place.key in watched:
                continue
            _, before = snapshot.copies.pop(place.key, (place, None))
            if before is not None and place.copy(place.owner) != before:
                self.generators.append(place)
                snapshot.copies[place.key] = place, before

    def _may_be_written(self, tensor: Tensor) -> bool:
        return id(tensor) not in self.statistics  # what batch norm computes does not depend on them

    def _is_written(self, tensor: Tensor) -> bool:
        known = self.written.get(id(tensor))
        return known is not None and known() is tensor and self._may_be_written(tensor)


@contextmanager
def undone(watch: Watch) -> Iterator[None]:
    """Restore the state that `watch` sees after the body, with the generators that all code shares."""
    snapshot = watch.whole()
    try:
        yield
    finally:
        snapshot.undo()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _cloned(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return {key: tensor.detach().clone() for key, tensor in tensors.items()}


def _substituted(copy: Any, tensors: dict[int, Tensor]) -> Any:
    if isinstance(copy, dict):
        return {name: tensors.get(id(value), value) for name, value in copy.items()}
    return [tensors.get(id(value), value) for value in copy] if isinstance(copy, list) else copy


def _different(before: Any, after: Any) -> str | None:
    """Return the name of what differs between copies of a place, perhaps empty; None if nothing does."""
    if isinstance(after, dict):
        if before.keys() != after.keys():
            return str(next(iter(before.keys() ^ after.keys())))
        return next((str(n) for n, value in after.items() if not _is_like(before[n], value)), None)
    if isinstance(after, list):
        same = len(before) == len(after) and all(map(_is_like, before, after))
        return None if same else ""
    return None if before is after or _equal(before, after) else ""


def _is_like(before: Any, after: Any) -> bool:
    """Return whether two values are the same, or equal constants, or equal tensors that no input has made."""
    if before is after:
        return True
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        if before.shape != after.shape or not before.dim() or before.requires_grad or after.requires_grad:
            return False
        return isinstance(after, FakeTensor) or torch.equal(before, after)
    constant = type(before) is type(after) and isinstance(after, (bool, int, float, str, torch.Size))
    return constant and _equal(before, after)


def _equal(before: Any, after: Any) -> bool:
    return bool(before == after)
