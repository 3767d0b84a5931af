"""Quantization with running ranges: Mesa (arXiv 2111.11124), section 3.2, `ema_decay` in policy.txt.

Each group's width and minimum are exponential moving averages over training steps, initialized by the first
step. Values outside a range take its nearest end (Rule 5). The ranges in use are stored with the packed
tensor (Rule 4). What is hard is a forward that runs inside backward. It must not update the averages, or a
second backward would use others. A non-reentrant checkpoint runs a forward again, and uses the ranges of that
forward. A reentrant checkpoint enables gradients only in its run inside backward, so no forward has made
ranges for it. Its tensors use their own minimum and maximum, and so do tensors without a memory (compiled
code).
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._C import _autograd

from mesa_tune.codecs import quantize
from mesa_tune.codecs.spec import Memory, Spec
from mesa_tune.notice import warn_once
from mesa_tune.ops import reference
from mesa_tune.ops.codecs import RAW

_COMPILED = (
    "mesa-tune: under torch.compile `ema_decay` has no effect: each tensor is stored in its own range.\n"
    "Train eagerly for running ranges, or leave `ema_decay` out."
)

GROUPS_AT_ONCE = 16384
"""Ranges are made for so many groups at a time: the arithmetic has about ten temporaries of their size."""


def encode(x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
    """Return the parts that `quantize` returns: the packed codes, and the ranges in use.

    `memory` has Mesa's names: `clip_val` (widths) and `shift` (minima) of the groups, NaN before a group's
    first update, and `iteration`, 0 before the first update of all. A group that contains NaN or Inf does not
    update it. The finite elements of such a group use its running range, or become NaN where it has none.
    """
    if memory is None:
        if torch.compiler.is_compiling():
            warn_once(_COMPILED)
        return quantize.encode_with_ranges(x, spec, key)
    ranges = RAW.extents(x, spec.group_size, spec.quant_groups)
    for extents, ends in _ends(ranges, spec.ema_decay, memory):
        within = reference.ranges_of(ends[:, 0], ends[:, 1], spec.levels)
        gaps = reference.with_gaps(reference.ranges_of(ends[:, 0], ends[:, 1], spec.levels - 1), spec.levels)
        extents.copy_(torch.where(_finite(extents)[:, None], within, gaps))
    sizes = (spec.bits, spec.levels, spec.group_size, spec.quant_groups)
    return [RAW.quantize_within(x, ranges, *sizes, spec.stochastic, key), ranges]


def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
    """Return what `quantize.decode` returns."""
    return quantize.decode(parts, shape, dtype, spec)


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """Return the bytes of packed codes and ranges; these are float32 whatever the tensor's dtype."""
    return quantize.packed_bytes(shape, spec)


def memory_bytes(shape: Sequence[int], spec: Spec) -> int:
    """Return the bytes of the memory: two float32 numbers per group, and the number of updates."""
    return 8 * reference.group_count(math.prod(shape), spec.group_size, spec.quant_groups) + 4


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _finite(extents: Tensor) -> Tensor:
    return torch.isfinite(extents).all(1)


def _ends(extents: Tensor, decay: float, memory: Memory) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the extents of some groups, a view, and minima and maxima of the ranges to store them in.

    A forward updates the averages. One that runs again uses those of the forward; the tensor's extents where
    no forward made any.
    """
    updates = not _in_backward()
    if not updates and not (_checkpoint_runs_again() and _knows(memory, len(extents))):
        yield from ((piece, piece) for piece in extents.split(GROUPS_AT_ONCE))
        return
    pieces = [rows.split(GROUPS_AT_ONCE) for rows in (extents, *_averages(extents, memory))]
    # Before the first update a memory may contain the initial values of Mesa's buffers: 0 and 1.
    initial = memory["iteration"].to(extents.device) == 0
    for own, width, minimum in zip(*pieces, strict=True):
        state = torch.where(initial, math.nan, torch.stack([width, minimum]))
        if updates:
            state = _updated(state, own, decay)
            width.copy_(state[0])
            minimum.copy_(state[1])
        ends = torch.stack([state[1], state[1] + state[0]], 1)
        yield own, torch.where(torch.isnan(ends), own, ends)
    if updates:
        memory["iteration"].add_(1)


def _updated(state: Tensor, extents: Tensor, decay: float) -> Tensor:
    """Return the averages after a step with these extents, `[2, groups]`."""
    current = torch.stack([extents[:, 1] - extents[:, 0], extents[:, 0]])
    updated = torch.where(torch.isnan(state), current, state - (1 - decay) * (state - current))
    return torch.where(_finite(extents), updated, state)


def _knows(memory: Memory, groups: int) -> bool:
    return "shift" in memory and memory["shift"].shape[0] >= groups


def _checkpoint_runs_again() -> bool:
    """Return whether the saved-tensor hooks of a non-reentrant checkpoint that runs again are on."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None


def _averages(extents: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
    """Return the running widths (max − min) and minima of this batch's groups, views of the memory.

    Groups that the memory does not have yet are added to it, as NaN. A smaller batch uses the first groups.
    """
    groups = extents.shape[0]
    for name in ("clip_val", "shift"):
        saved = memory.get(name, extents.new_empty(0))
        if name not in memory or saved.shape[0] < groups or saved.device != extents.device:
            saved = saved.to(extents.device)
            missing = extents.new_full((max(0, groups - saved.shape[0]),), math.nan)
            memory[name] = torch.cat([saved, missing])
    memory.setdefault("iteration", extents.new_zeros(1))
    return memory["clip_val"][:groups], memory["shift"][:groups]
