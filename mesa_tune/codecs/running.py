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
from collections.abc import Sequence

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
    extents = RAW.extents(x, spec.group_size, spec.quant_groups)
    ends = _ends_of_forward(extents, memory) if _in_backward() else _updated(extents, spec.ema_decay, memory)
    ranges = reference.ranges_of(ends[:, 0], ends[:, 1], spec.levels)
    gaps = reference.with_gaps(reference.ranges_of(ends[:, 0], ends[:, 1], spec.levels - 1), spec.levels)
    ranges = torch.where(_finite(extents)[:, None], ranges, gaps)
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


def _updated(extents: Tensor, decay: float, memory: Memory) -> Tensor:
    """Update the averages in `memory` by the tensor's extents; return minima and maxima of the new ranges."""
    state = _state(extents, memory)
    state = torch.where(memory["iteration"].to(extents.device) == 0, math.nan, state)
    current = torch.stack([extents[:, 1] - extents[:, 0], extents[:, 0]])
    updated = torch.where(torch.isnan(state), current, state - (1 - decay) * (state - current))
    updated = torch.where(_finite(extents), updated, state)
    memory["clip_val"][: extents.shape[0]] = updated[0]
    memory["shift"][: extents.shape[0]] = updated[1]
    memory["iteration"].add_(1)
    return _ends(updated, extents)


def _ends_of_forward(extents: Tensor, memory: Memory) -> Tensor:
    """Return minima and maxima that the forward used; the tensor's extents where no forward made any."""
    if not _checkpoint_runs_again() or "shift" not in memory or memory["shift"].shape[0] < extents.shape[0]:
        return extents
    # Before the first update a memory may contain the initial values of Mesa's buffers: 0 and 1.
    initial = memory["iteration"].to(extents.device) == 0
    return torch.where(initial, extents, _ends(_state(extents, memory), extents))


def _checkpoint_runs_again() -> bool:
    """Return whether the saved-tensor hooks of a non-reentrant checkpoint that runs again are on."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None


def _ends(state: Tensor, extents: Tensor) -> Tensor:
    """Return minimum and maximum of each group, `[groups, 2]`; the tensor's extents where `state` has NaN."""
    ends = torch.stack([state[1], state[1] + state[0]], 1)
    return torch.where(torch.isnan(ends), extents, ends)


def _state(extents: Tensor, memory: Memory) -> Tensor:
    """Return the running widths (max − min) and minima of this batch's groups, `[2, groups]`.

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
    return torch.stack([memory["clip_val"][:groups], memory["shift"][:groups]])
