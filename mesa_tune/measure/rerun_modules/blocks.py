"""Modules that could run again in backward (`store: recompute`).

What is hard: blocks contain blocks, and a timeline knows one level of them. The smallest blocks save little,
and the largest are whole again for a moment. So each level is traced, and that of the least peak is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from mesa_tune.conversion.layers import named_layers
from mesa_tune.measure.memory.step_trace import StepTrace
from mesa_tune.policy import Policy
from mesa_tune.profiles.other_entries import REFERENCE
from mesa_tune.profiles.timeline.step_arrays import block_of


def rerunning(policy: Policy, modules: Mapping[str, int]) -> Policy:
    """Return `policy` under which `modules` also run again in backward, each in so many slices."""
    return policy.rerunning({name: replace(REFERENCE, tile=count) for name, count in modules.items()})


def whole(modules: Iterable[str]) -> dict[str, int]:
    """Return that each of `modules` runs in one slice."""
    return dict.fromkeys(modules, 1)


def all_run_again(trace: StepTrace, modules: Collection[str]) -> bool:
    """Return whether each of `modules` runs again in the traced step, and nothing else does."""
    again = {block_of(slot.layer, modules) for slot in trace.slots if slot.again and slot.layer}
    return again == set(modules)


def block_levels(model: nn.Module, plain: StepTrace) -> Iterator[tuple[str, ...]]:
    """Yield the modules of which a search may let some run again, one level of blocks after the other.

    Blocks are elements of lists and sequences of modules that have parameters, and save tensors of at least
    two layers. `plain`: the traced plain step. A level has the blocks of one depth,
    and those of less depth that contain none.
    """
    blocks = list(_blocks(model, plain))
    depth = {name: sum(name.startswith(f"{other}.") for other in blocks) for name in blocks}
    for level in range(max(depth.values(), default=-1) + 1):
        here = {name for name in blocks if depth[name] == level}
        above = [name for name in blocks if depth[name] < level]
        here |= {name for name in above if not any(other.startswith(f"{name}.") for other in blocks)}
        yield tuple(name for name in blocks if name in here)


def _blocks(model: nn.Module, plain: StepTrace) -> Iterator[str]:
    saving = plain.saving_layers
    for outer, container in named_layers(model):
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        for name, block in container.named_children():
            path = f"{outer}.{name}".lstrip(".")
            inside = {layer for layer in saving if layer.startswith(f"{path}.")}
            if len(inside) > 1 and any(True for _ in block.parameters()):
                yield path
