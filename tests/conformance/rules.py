"""One check a rule of the design. Each takes a case (and a situation) and fails with AssertionError.

`tests/formulas/test_conformance_broken.py` shows for every check something broken that it catches.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune import ops
from mesa_tune.codecs import CODECS, Spec
from mesa_tune.engine.registry import registry
from mesa_tune.engine.storage import decided, restore, store
from mesa_tune.errors import RunError
from mesa_tune.policy import Policy
from tests.conformance.cases import Case, case
from tests.conformance.running import (
    PLAIN,
    Situation,
    build,
    converted,
    forward,
    gradients,
    relative_error,
    saved_bytes,
    scored,
    step,
    uncoded,
)
from tests.step_memory import Composed

EIGHT_BITS = 2e-3
"""Relative squared error of a gradient at 8 bits, groups of 64: (1/255)² times at most some tens."""


def check_rule_1(case: Case, situation: Situation = PLAIN) -> None:
    """Output, buffers and random state are bitwise plain's, and the gradient is near plain's."""
    model, x = build(case, situation)
    coded = converted(model)
    try:
        right = step(model, x, situation)
    except RuntimeError as error:
        # In-place after a function that keeps its own output: PyTorch itself refuses.
        if re.search("in-?place operation", str(error)):
            return
        raise
    found = step(coded, x, situation)
    assert torch.equal(found.output, right.output), "the output is not bitwise plain's"
    assert torch.equal(found.random_state, right.random_state), "a generator of torch was advanced"
    assert all(torch.equal(found.buffers[k], right.buffers[k]) for k in right.buffers), "a buffer differs"
    low = situation.autocast or situation.dtype != torch.float32
    assert relative_error(found.gradients, right.gradients) < (1e-2 if low else EIGHT_BITS)


def check_formula(case: Case) -> None:
    """With nothing encoded the gradient is PyTorch's to rounding."""
    model, x = build(case)
    right = step(model, x)
    assert relative_error(step(uncoded(model), x).gradients, right.gradients) < 1e-10


def check_rule_2(case: Case, situation: Situation = PLAIN) -> None:
    """Never more bytes than plain, even where the settings would not pay; none without gradients."""
    model, x = build(case, situation)
    plain = saved_bytes(model, x, situation)
    for settings in ({"group_size": 64}, {"group_size": 2}):
        found = saved_bytes(converted(model, **settings), x, situation)
        assert found <= plain, f"keeps {found} bytes, plain {plain}, with {settings}"
    with torch.no_grad():
        coded = converted(model)
        assert forward(coded, x, situation).grad_fn is None
    if situation == PLAIN and case.tags != "relu":
        kept = saved_bytes(converted(model, level=16), x)
        assert kept < 0.5 * plain, f"keeps {kept} bytes of {plain} at 4 bits"


def check_rule_3_once() -> None:
    """Three linears of one input keep one packed copy; with other settings for one of them, two."""

    def summed(model: Any, x: Tensor) -> Any:
        h = x + model.shift
        return model.q(h) + model.k(h) + model.v(h)

    layers = {name: nn.Linear(64, 64) for name in ("q", "k", "v")}
    three = Composed(summed, **layers, shift=nn.Parameter(torch.zeros(64)))
    x = torch.randn(4, 32, 64)
    packed, other = (ops.packed_bytes(x.shape, bits, 256) for bits in (4, 2))
    text = "# mesa-tune policy 1\non fc:\n    by_index: all\n    level: 16\n"
    one, two = Policy.parse(text), Policy.parse(text + "\n    by_index: 1\n    level: 4\n")
    rows = x.numel() // 64 // 8  # a bit per row: which are zero
    for policy, bytes_expected in ((one, packed + rows), (two, packed + other + rows)):
        model = mt.convert(copy.deepcopy(three), policy, seed=1, min_elements=0)
        found = saved_bytes(model, x)
        assert found == bytes_expected, f"keeps {found} bytes, not {bytes_expected}"


def check_rule_3_never_stale() -> None:
    """A copy is not found again after its tensor has changed in place, or died and left its address."""
    spec, key = Spec("quantize", 8, 256, 64, 0, True, 0), torch.tensor([7])

    def kept(tensor: Tensor) -> tuple[Tensor, list[Tensor]]:
        packing = decided(tensor, spec)
        parts = store(tensor, packing, spec, key)
        return restore(parts, packing, spec), parts

    registry.clear()
    x = torch.randn(64, 64)
    first, parts = kept(x)
    assert _near(first, x)
    _, same = kept(x)
    assert all(a is b for a, b in zip(parts, same, strict=True)), "an unchanged tensor was encoded twice"
    x.mul_(-3)
    assert _near(kept(x)[0], x), "a stale copy after an in-place change"
    held, memory = [], bytearray(4 * 64 * 64)  # where each tensor lies in its turn
    for _ in range(3):
        torch.frombuffer(memory, dtype=torch.float32).copy_(torch.randn(64 * 64))
        y = torch.frombuffer(memory, dtype=torch.float32).view(64, 64)
        decoded, parts = kept(y)
        held.append(parts)  # the copy outlives its tensor
        assert _near(decoded, y), "a stale copy at a reused address"
        del y


def _near(decoded: Tensor, x: Tensor) -> bool:
    return bool((decoded - x).abs().max() <= 1.001 * (x.amax() - x.amin()) / 255)


def check_rule_4(case: Case) -> None:
    """A module that runs twice before backward gives the sum of both gradients."""
    model, x = build(case)
    coded = converted(model)
    wide = 2 * torch.randn_like(x) + 1  # another range: whoever keeps ranges by reference decodes wrongly
    right, found = (_two_forwards(each, x, wide) for each in (model, coded))
    assert relative_error(found, right) < EIGHT_BITS


def _two_forwards(model: nn.Module, x: Tensor, wide: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    first, second = forward(model, x), forward(model, wide)
    scored(second).backward()
    scored(first).backward()
    return gradients(model)


def check_rule_5(levels: int = 256) -> None:
    """Every decoded value lies within its group's range, at most a step from the value itself."""
    bits = (levels - 1).bit_length()
    spec = Spec("quantize", bits, levels, 32, 0, True, 0)
    x = torch.cat([torch.randn(64, 32), 1e4 + torch.randn(8, 32), torch.randn(8, 32) * 1e-6])
    parts = CODECS["quantize"].encode(x, spec, torch.tensor([3]))
    decoded = CODECS["quantize"].decode(parts, x.shape, x.dtype, spec)
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    size = (high - low) / (levels - 1) * 1.001 + 1e-6 * high.abs()
    assert bool(((decoded >= low - size) & (decoded <= high + size)).all()), "outside of its group's range"
    assert bool(((decoded - x).abs() <= size).all()), "further away than one step"


def check_rule_6_unbiased(case: Case, seeds: int = 40) -> None:
    """The mean of the gradient over seeds is plain's within its standard error; the seeds differ."""
    model, x = build(case)
    right = _flat(step(model, x).gradients)
    coded = converted(model, level=16)
    draws = torch.stack([_flat(step(coded, x).gradients) for _ in range(seeds)])
    assert not torch.equal(draws[0], draws[1]), "equal noise in two forwards"
    deviation = draws.mean(0) - right
    error = draws.std(0) / seeds**0.5
    # Of independent errors the sum of squares is near its expectation; correlated ones spread wider.
    ratio = float(deviation.square().sum() / error.square().sum())
    assert ratio < 3, f"the mean is {ratio:.1f} times its variance away"


def _flat(found: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten().double() for each in found.values()])


def check_rule_6_seeds(case: Case) -> None:
    """Equal seeds give equal gradients, others and the next forward do not; no generator of torch moves."""
    model, x = build(case)
    first, same, other = (converted(model, level=16, seed=seed) for seed in (1, 1, 2))
    one = _flat(step(first, x).gradients)
    assert torch.equal(one, _flat(step(same, x).gradients)), "equal seeds, other gradients"
    assert not torch.equal(one, _flat(step(other, x).gradients)), "other seeds, equal gradients"
    assert not torch.equal(one, _flat(step(first, x).gradients)), "the next forward has the same noise"
    plain = step(model, x)
    assert torch.equal(step(first, x).random_state, plain.random_state), "a generator of torch was advanced"


def check_rule_7(case: Case) -> None:
    """Inputs of tiny variance or huge scale, at 2 bits: the gradient's error is bounded as for any input."""
    model, x = build(case)
    # Scores of a huge scale leave plain attention and cross-entropy themselves without a gradient.
    saturates = case.saturates or {"attention", "softmax", "loss"} & set(case.tags.split())
    given = {"as it is": x, "tiny": x * 1e-4, "far from zero": x * 1e-3 + 3, "tiny rows between": _uneven(x)}
    for name, each in given.items() if saturates else (*given.items(), ("huge", x * 1e3)):
        error = relative_error(step(converted(model, level=4), each).gradients, step(model, each).gradients)
        assert error < 4, f"error {error:.2g} at 2 bits for inputs that are {name}"


def _uneven(x: Tensor) -> Tensor:
    """Every second row (or channel) is tiny: its group's range is the others'."""
    y = x.clone()
    y[:, ::2] *= 1e-4
    return y


def check_rule_8(case: Case) -> None:
    """Keys, parameters, signatures, types and hooks are plain's; copies are independent; revert restores."""
    plain, x = build(case)
    right = step(plain, x)
    coded = converted(plain, level=16)
    assert list(coded.state_dict()) == list(plain.state_dict())
    for (name, a), (other, b) in zip(plain.named_modules(), coded.named_modules(), strict=True):
        assert name == other
        assert type(a) is type(b)
        assert inspect.signature(a.forward) == inspect.signature(b.forward), f"signature of {name!r}"
    assert [n for n, _ in coded.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in coded.named_buffers()] == [n for n, _ in plain.named_buffers()]
    for clone in (copy.deepcopy(coded), pickle.loads(pickle.dumps(coded))):
        _check_independent(clone, coded, x)
    assert _hook_trace(coded, x) == _hook_trace(copy.deepcopy(plain), x), "hooks fire otherwise"
    fresh = mt.revert(converted(plain))
    found = step(fresh, x)
    assert torch.equal(found.output, right.output)
    assert all(torch.equal(found.gradients[k], right.gradients[k]) for k in right.gradients), "not reverted"
    assert not any("forward" in module.__dict__ for module in fresh.modules())


def _check_independent(clone: nn.Module, coded: nn.Module, x: Tensor) -> None:
    assert saved_bytes(clone, x) == saved_bytes(coded, x), "the copy is not converted"
    before = step(coded, x).output
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.add_(1)
    assert torch.equal(step(coded, x).output, before), "the copy shares parameters"
    if any(True for _ in clone.layer.parameters()):  # type: ignore[union-attr]
        assert not torch.equal(step(clone, x).output, before), "the copy runs the first one's module"


def _hook_trace(model: nn.Module, x: Tensor) -> list[str]:
    seen: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, a, name=name: seen.append(f"before {name}"))
        module.register_forward_hook(lambda m, a, y, name=name: seen.append(f"after {name}"))
        module.register_full_backward_hook(lambda m, a, b, name=name: seen.append(f"backward {name}"))
    step(model, x)
    return seen


def check_rule_9(case: Case) -> None:
    """A second backward on a kept graph gives the same gradient; create_graph raises and names the layer."""
    model, x = build(case)
    coded = converted(model, level=16)
    loss = scored(forward(coded, x))
    both = []
    for _ in range(2):
        coded.zero_grad(set_to_none=True)
        loss.backward(retain_graph=True)
        both.append(_flat(gradients(coded)))
    assert torch.equal(both[0], both[1]), "the second backward on a kept graph differs"
    with pytest.raises(RunError, match="layer") as raised:
        torch.autograd.grad(loss, [p for p in coded.parameters() if p.requires_grad], create_graph=True)
    assert "create_graph" in str(raised.value)


def check_rule_6_in(situation: Situation) -> None:
    """Each step's gradient differs from the one before it, as their noise does."""
    model, x = build(case("Linear"), situation)
    coded = converted(model, level=16)
    flat = [_flat(step(coded, x, situation).gradients) for _ in range(3)]
    assert not any(torch.equal(a, b) for a, b in pairwise(flat))
