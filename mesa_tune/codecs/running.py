"""Quantization in running ranges: Mesa (arXiv 2111.11124), section 3.2, `ema_decay` in policy.txt.

Each group's width and minimum are exponential averages over training steps, beginning with the first step's
own; values outside take the nearest end (Rule 5), and the ranges used are stored with the packed tensor (Rule
4). A run of a forward in backward must not move the averages: a second backward would find other ones. A
non-reentrant checkpoint runs again what a forward has run, in the ranges of that forward. A reentrant one
runs for the first time with gradients in backward, where no forward has made ranges for it. Its tensors, and
those without a memory (compiled code), are stored in their own range.
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
    """As `quantize`: packed levels, and the ranges that were used.

    `memory` has Mesa's names: `clip_val` (widths) and `shift` (minima) of the groups, NaN where nothing is
    known yet, and `iteration`, 0 until the first update. A group that holds NaN or Inf leaves no trace in it;
    what else it holds survives in the range known so far, and becomes NaN, too, where there is none.
    """
    if memory is None:
        if torch.compiler.is_compiling():
            warn_once(_COMPILED)
        return quantize.in_single(x, spec, key)
    own = RAW.extents(x, spec.group_size, spec.quant_groups)
    used = _known(own, memory) if _in_backward() else _updated(own, spec.ema_decay, memory)
    ranges = reference.ranges_of(used[:, 0], used[:, 1], spec.levels)
    gaps = reference.with_gaps(reference.ranges_of(used[:, 0], used[:, 1], spec.levels - 1), spec.levels)
    ranges = torch.where(_finite(own)[:, None], ranges, gaps)
    sizes = (spec.bits, spec.levels, spec.group_size, spec.quant_groups)
    return [RAW.quantize_within(x, ranges, *sizes, spec.stochastic, key), ranges]


def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
    """As `quantize`."""
    return quantize.decode(parts, shape, dtype, spec)


def packed_bytes(shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
    """As `quantize`."""
    return quantize.packed_bytes(shape, spec)


def memory_bytes(shape: Sequence[int], spec: Spec) -> int:
    """Bytes of the memory: two numbers a group, and the count of steps."""
    return 8 * reference.group_count(math.prod(shape), spec.group_size, spec.quant_groups) + 4


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _finite(own: Tensor) -> Tensor:
    return torch.isfinite(own).all(1)


def _updated(own: Tensor, decay: float, memory: Memory) -> Tensor:
    """The ranges after this step's; `memory` holds them from now on."""
    state = _state(own, memory)
    state = torch.where(memory["iteration"].to(own.device) == 0, math.nan, state)
    fresh = torch.stack([own[:, 1] - own[:, 0], own[:, 0]])
    moved = torch.where(torch.isnan(state), fresh, state - (1 - decay) * (state - fresh))
    moved = torch.where(_finite(own), moved, state)
    memory["clip_val"][: own.shape[0]] = moved[0]
    memory["shift"][: own.shape[0]] = moved[1]
    memory["iteration"].add_(1)
    return _ends(moved, own)


def _known(own: Tensor, memory: Memory) -> Tensor:
    """The ranges of the forward that runs again; the tensor's own where there was none."""
    if not _checkpointed_again() or "shift" not in memory or memory["shift"].shape[0] < own.shape[0]:
        return own
    # Before the first update a memory may hold initial values, as Mesa's buffers do: 0 and 1.
    unknown = memory["iteration"].to(own.device) == 0
    return torch.where(unknown, own, _ends(_state(own, memory), own))


def _checkpointed_again() -> bool:
    """Whether a non-reentrant checkpoint's hooks are on: it records what its forward would have saved."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None


def _ends(state: Tensor, own: Tensor) -> Tensor:
    ends = torch.stack([state[1], state[1] + state[0]], 1)
    return torch.where(torch.isnan(ends), own, ends)


def _state(own: Tensor, memory: Memory) -> Tensor:
    """Widths and minima of the groups, `[2, groups]`; the memory grows for a tensor with more of them.

    A smaller batch has the first groups of a larger one.
    """
    groups = own.shape[0]
    for name in ("clip_val", "shift"):
        known = memory.get(name, own.new_empty(0))
        if name not in memory or known.shape[0] < groups or known.device != own.device:
            known = known.to(own.device)
            more = own.new_full((max(0, groups - known.shape[0]),), math.nan)
            memory[name] = torch.cat([known, more])
    memory.setdefault("iteration", own.new_zeros(1))
    return torch.stack([memory["clip_val"][:groups], memory["shift"][:groups]])
