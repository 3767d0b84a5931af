"""The step as a memory snapshot in the format of `torch.cuda.memory._dump_snapshot`.

PyTorch's memory viewer opens it (https://docs.pytorch.org/memory_viz). What is hard: a timeline knows how
many bytes of working memory each moment has, not which tensors these are. So each moment has one block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mesa_tune.profiles.prediction import GRADIENTS, SAVED, WORKING, moment_text
from mesa_tune.profiles.timeline.distinct import Assignment
from mesa_tune.profiles.timeline.sized_timeline import SizedTimeline

_BASE = 1 << 40
KEPT = "kept from step to step"


def snapshot(sized: SizedTimeline, assignment: Assignment) -> dict[str, Any]:
    """Return the snapshot of the step under `assignment`: its peak is that of the timeline, to the byte.

    Frames of a block: the layer or kind of its bytes as a function, the kind as a file.
    """
    step, device = sized.under(assignment), _Device()
    for kind, size in {**sized.static_kinds, KEPT: int(step.kept.sum())}.items():
        device.allocate(size, kind, kind)
    births, deaths = sized.edges
    sizes, work = step.spans - step.kept, step.work
    gradients = np.clip(sized.once.gradients, 0, np.maximum(work, 0))
    saved: dict[int, _Block] = {}
    accumulated: list[_Block] = []
    for number, slot in enumerate(sized.slots):
        moment = moment_text(slot.phase, slot.layer)
        for span in np.flatnonzero(deaths == number).tolist():
            device.free(saved.pop(span, None))
        for span in np.flatnonzero((births == number) & (sizes > 0)).tolist():
            name = ", ".join(sized.spans[span].layers) or SAVED
            saved[span] = device.allocate(int(sizes[span]), name, SAVED)
        _grow(device, accumulated, int(gradients[number]), f"gradient {moment}")
        working = int(work[number] - gradients[number])
        unwritten = _shrunk(device, saved, -working) if working < 0 else None
        device.free(device.allocate(max(0, working), moment, WORKING))
        if unwritten is not None:
            device.free(saved[unwritten[0]])
            saved[unwritten[0]] = device.allocate(unwritten[1].size, unwritten[1].name, SAVED)
    return device.snapshot()


def _grow(device: _Device, blocks: list[_Block], size: int, name: str) -> None:
    """Allocate or free blocks, the latest first, until they have this size together."""
    left = sum(block.size for block in blocks) - size
    while left > 0:
        last = blocks.pop()
        device.free(last)
        left -= last.size
    if left < 0:
        blocks.append(device.allocate(-left, name, GRADIENTS))


def _shrunk(device: _Device, saved: dict[int, _Block], by: int) -> tuple[int, _Block] | None:
    """Replace the largest saved block by a smaller one: some of it was never written. Return the block."""
    span = max(saved, key=lambda each: saved[each].size, default=None)
    if span is None:
        return None
    block = saved[span]
    device.free(block)
    saved[span] = device.allocate(max(0, block.size - by), block.name, SAVED)
    return span, block


@dataclass(frozen=True)
class _Block:
    """A block of memory, and what it is for."""

    address: int
    size: int
    name: str
    kind: str

    @property
    def frames(self) -> list[dict[str, Any]]:
        return [{"name": self.name, "filename": self.kind, "line": 0}]


@dataclass
class _Device:
    """Blocks on a device without end: no address is used twice."""

    events: list[dict[str, Any]] = field(default_factory=list)
    alive: dict[int, _Block] = field(default_factory=dict)
    end: int = _BASE

    def allocate(self, size: int, name: str, kind: str) -> _Block:
        """Return a new block; nothing is noted of one without bytes."""
        block = _Block(self.end, size, name, kind)
        if size:
            self.end += size
            self.alive[block.address] = block
            self._note("alloc", block)
        return block

    def free(self, block: _Block | None) -> None:
        """Free a block, if there is one."""
        if block is not None and block.size:
            del self.alive[block.address]
            self._note("free_requested", block)
            self._note("free_completed", block)

    def _note(self, action: str, block: _Block) -> None:
        self.events.append(
            {
                "action": action,
                "addr": block.address,
                "size": block.size,
                "stream": 0,
                "time_us": len(self.events),
                "frames": block.frames,
            }
        )

    def snapshot(self) -> dict[str, Any]:
        """Return all events, and one segment around all blocks: with those that are left, and gaps."""
        blocks, end = list[dict[str, Any]](), _BASE
        for block in self.alive.values():
            blocks += [*_gap(end, block.address), _alive(block)]
            end = block.address + block.size
        left = sum(block.size for block in self.alive.values())
        segment = {
            "device": 0,
            "address": _BASE,
            "total_size": self.end - _BASE,
            **dict.fromkeys(("allocated_size", "active_size", "requested_size"), left),
            "stream": 0,
            "segment_type": "large",
            "blocks": [*blocks, *_gap(end, self.end)],
            "frames": [],
        }
        return {"segments": [segment], "device_traces": [self.events]}


def _alive(block: _Block) -> dict[str, Any]:
    size = {"address": block.address, "size": block.size, "requested_size": block.size}
    return {**size, "state": "active_allocated", "frames": block.frames}


def _gap(begin: int, end: int) -> list[dict[str, Any]]:
    size = {"address": begin, "size": end - begin, "requested_size": 0}
    return [{**size, "state": "inactive", "frames": []}] if begin < end else []
