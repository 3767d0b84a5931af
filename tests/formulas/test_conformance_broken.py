"""Each rule's check catches something that breaks the rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mesa_tune.codecs import CODECS, Spec, quantize
from mesa_tune.conversion.model import ConvertedForward
from mesa_tune.conversion.wrapping import ReplacementForward
from mesa_tune.engine import storage
from mesa_tune.engine.formula import Formula, Grads, Result, Saved
from mesa_tune.engine.function import Apply
from mesa_tune.formulas.norms import layer_norm
from mesa_tune.formulas.table import FAMILIES, FORMULAS
from tests.conformance import rules
from tests.conformance.cases import case
from tests.conformance.running import SITUATIONS

LINEAR = case("Linear")
FROZEN = next(each for each in SITUATIONS if each.id == "frozen-weight")
Patch = pytest.MonkeyPatch


def _break_formula(patch: Patch, name: str, **parts: Any) -> None:
    right = FORMULAS[name]
    for family in FAMILIES:
        for key, value in vars(family).items():
            if value is right:
                patch.setattr(family, key, replace(right, **parts))


def _break_codec(patch: Patch, **parts: Callable[..., Any]) -> None:
    whole = {"encode": quantize.encode, "decode": quantize.decode, "packed_bytes": quantize.packed_bytes}
    patch.setitem(CODECS, "quantize", SimpleNamespace(**{**whole, **parts}))


def _slightly_more(output: Tensor) -> Tensor:
    return output * (1 + 2**-20)


def _draws(output: Tensor) -> Tensor:
    torch.rand(1)
    return output


@pytest.mark.parametrize("change", [_slightly_more, _draws])
def test_rule_1_catches(monkeypatch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    right: Formula = FORMULAS["linear"]

    def forward(*args: Any) -> Result:
        result = right.forward(*args)
        return result._replace(output=change(result.output))

    _break_formula(monkeypatch, "linear", forward=forward)
    with pytest.raises(AssertionError):
        rules.check_rule_1(LINEAR)


def test_formula_check_catches_a_wrong_factor(monkeypatch: Patch) -> None:
    right = FORMULAS["linear"].backward

    def backward(saved: Saved, grad: Tensor) -> Grads:
        dx, dw, db = right(saved, grad)
        return dx, None if dw is None else dw * 1.001, db

    _break_formula(monkeypatch, "linear", backward=backward)
    with pytest.raises(AssertionError):
        rules.check_formula(LINEAR)


def test_rule_2_catches_keeping_for_a_frozen_weight(monkeypatch: Patch) -> None:
    right = FORMULAS["linear"]

    def forward(static: Any, needs: Any, *tensors: Any) -> Result:
        return right.forward(static, needs, *tensors)._replace(lossy=(tensors[0], tensors[1]))

    def backward(saved: Saved, grad: Tensor) -> Grads:
        needs, lossy = saved.needs, saved.lossy
        used = ([lossy[0]] if needs[1] else []) + ([lossy[1]] if needs[0] else [])
        return right.backward(saved._replace(lossy=used), grad)

    _break_formula(monkeypatch, "linear", forward=forward, backward=backward)
    with pytest.raises(AssertionError, match="keeps"):
        rules.check_rule_2(LINEAR, FROZEN)


def test_rule_2_catches_settings_that_do_not_pay(monkeypatch: Patch) -> None:
    right = storage._packing
    monkeypatch.setattr(storage, "_packing", lambda *of: right(*of)._replace(bytes=0, packed=True))
    monkeypatch.setattr(storage, "_packings", {})
    with pytest.raises(AssertionError, match="keeps"):
        rules.check_rule_2(LINEAR)


def test_rule_3_catches_a_copy_for_each(monkeypatch: Patch) -> None:
    monkeypatch.setattr(storage, "once", lambda _, __, make, *arguments: make(*arguments))
    monkeypatch.setattr(storage, "filed", lambda *_: None)
    with pytest.raises(AssertionError, match="keeps"):
        rules.check_rule_3_once()


@pytest.mark.parametrize("by", ["address", "storage without version"])
def test_rule_3_catches_a_stale_copy(monkeypatch: Patch, by: str) -> None:
    copies: dict[int, list[Tensor]] = {}
    held: list[Tensor] = []

    def stale(tensor: Tensor, what: Any, make: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor]:
        place = tensor.data_ptr() + (tensor._version << 50 if by == "address" else 0)
        if by != "address":
            held.append(tensor)  # an address in use is never another's
        if place not in copies:
            copies[place] = make(*arguments)
        return copies[place]

    monkeypatch.setattr(storage, "once", stale)
    with pytest.raises(AssertionError, match="stale"):
        rules.check_rule_3_never_stale()


def test_rule_4_catches_ranges_kept_by_reference(monkeypatch: Patch) -> None:
    shared: dict[Any, Tensor] = {}

    def encode(x: Tensor, spec: Spec, key: Tensor, memory: Any = None) -> list[Tensor]:
        data, ranges = quantize.encode(x, spec, key)
        common = shared.setdefault(ranges.shape, ranges)
        # As a buffer of a module is written: autograd's version counter sees nothing.
        common.data.copy_(ranges)
        return [data, common]

    _break_codec(monkeypatch, encode=encode)
    with pytest.raises(AssertionError):
        rules.check_rule_4(LINEAR)


def test_rule_5_catches_values_that_wrap(monkeypatch: Patch) -> None:
    def encode(x: Tensor, spec: Spec, key: Tensor, memory: Any = None) -> list[Tensor]:
        rows = x.view(-1, spec.group_size)
        low, span = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)
        step = 0.9 * span / (spec.levels - 1)  # a running range is narrower than the tensor's own
        codes = ((rows - low) / step).round().remainder(spec.levels)
        return [codes * step + low]

    def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
        return parts[0].view(tuple(shape)).to(dtype)

    _break_codec(monkeypatch, encode=encode, decode=decode)
    with pytest.raises(AssertionError):
        rules.check_rule_5()


def test_rule_6_catches_bias(monkeypatch: Patch) -> None:
    def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
        steps = parts[1][:, 1].repeat_interleave(spec.group_size)[: torch.Size(shape).numel()]
        # Rounding down, always.
        return quantize.decode(parts, shape, dtype, spec) - steps.view(tuple(shape)) / 2

    _break_codec(monkeypatch, decode=decode)
    with pytest.raises(AssertionError, match="variance away"):
        rules.check_rule_6_unbiased(LINEAR)


@pytest.mark.parametrize("kind", ["nearest", "one seed for ever", "torch's generator"])
def test_rule_6_catches_dice(monkeypatch: Patch, kind: str) -> None:
    keys = {
        "nearest": lambda spec, key: (spec._replace(stochastic=False), key),
        "one seed for ever": lambda spec, key: (spec, torch.tensor([5])),
        "torch's generator": lambda spec, key: (spec, torch.randint(0, 9999, (1,))),
    }

    def encode(x: Tensor, spec: Spec, key: Tensor, memory: Any = None) -> list[Tensor]:
        return quantize.encode(x, *keys[kind](spec, key))  # type: ignore[no-untyped-call]

    _break_codec(monkeypatch, encode=encode)
    with pytest.raises(AssertionError):
        rules.check_rule_6_seeds(LINEAR)


def test_rule_7_catches_a_norm_that_keeps_its_input(monkeypatch: Patch) -> None:
    def forward(static: Any, needs: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Result:
        y, mean, rstd = torch.native_layer_norm(x, static[0], weight, bias, static[1])
        return Result(y, lossy=(x,), exact=(mean, rstd, weight, bias))

    def backward(saved: Saved, grad: Tensor) -> Any:
        x, (mean, rstd, weight, bias) = saved.lossy[0].whole(), saved.exact
        shape, wanted = saved.static[0], list(saved.needs[:3])
        return torch.ops.aten.native_layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, wanted)

    assert FORMULAS["layer_norm"] is layer_norm.LAYER_NORM
    _break_formula(monkeypatch, "layer_norm", forward=forward, backward=backward)
    with pytest.raises(AssertionError, match="at 2 bits"):
        rules.check_rule_7(case("LayerNorm"))


def test_rule_8_catches_a_lost_signature(monkeypatch: Patch) -> None:
    monkeypatch.delattr(ReplacementForward, "__signature__")
    with pytest.raises(AssertionError, match="signature"):
        rules.check_rule_8(LINEAR)


def test_rule_8_catches_a_copy_that_runs_the_first_model(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ConvertedForward, "__deepcopy__", lambda self, memo: self, raising=False)
    with pytest.raises(AssertionError, match="copy"):
        rules.check_rule_8(LINEAR)


def test_rule_9_catches_silent_second_derivatives(monkeypatch: Patch) -> None:
    right = Apply.backward

    def silent(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            return right(ctx, *grads)

    monkeypatch.setattr(Apply, "backward", staticmethod(silent))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        rules.check_rule_9(LINEAR)


def test_rule_9_catches_a_decode_that_uses_its_parts_up(monkeypatch: Patch) -> None:
    def decode(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
        decoded = quantize.decode(parts, shape, dtype, spec)
        parts[1].data.mul_(0.5)
        return decoded

    _break_codec(monkeypatch, decode=decode)
    with pytest.raises(AssertionError, match="second backward"):
        rules.check_rule_9(LINEAR)
