"""`nn.MultiheadAttention`: outputs and attention weights bit for bit, gradients, and what is kept."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune.nn as mn
from mesa_tune import notice
from mesa_tune.codecs import Spec
from mesa_tune.policy.settings import LayerSettings
from tests.builders import known

WIDTH, HEADS, ROWS, COLUMNS, COUNT = 32, 4, 9, 7, 3
CAUSAL = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
PADDING = torch.zeros(COUNT, ROWS, dtype=torch.bool).index_fill_(1, torch.tensor([ROWS - 1]), True)
FINE = LayerSettings(level=256, group_size=16)

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "self": ({}, {}),
    "self_weights": ({}, {"need_weights": True}),
    "self_weights_by_head": ({}, {"need_weights": True, "average_attn_weights": False}),
    "batch_first": ({"batch_first": True}, {}),
    "no_bias": ({"bias": False}, {"need_weights": True}),
    "dropout": ({"dropout": 0.3}, {}),
    "dropout_weights": ({"dropout": 0.3}, {"need_weights": True}),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True}),
    "mask": ({}, {"attn_mask": CAUSAL}),
    "mask_weights": ({}, {"attn_mask": CAUSAL, "need_weights": True}),
    "mask_by_head": ({}, {"attn_mask": torch.randn(COUNT * HEADS, ROWS, ROWS)}),
    "padding": ({}, {"key_padding_mask": PADDING}),
    "padding_weights": ({}, {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "need_weights": True}),
    "padding_causal": ({}, {"key_padding_mask": PADDING, "attn_mask": CAUSAL, "is_causal": True}),
    "cross": ({}, {}),
    "cross_shared_values": ({}, {"need_weights": True}),
    "other_widths": ({"kdim": 20, "vdim": 12}, {}),
    "unbatched": ({}, {"need_weights": True}),
}


def _inputs(name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)

    def made(rows: int, width: int) -> Tensor:
        shape = (COUNT, rows, width) if name == "batch_first" else (rows, COUNT, width)
        return torch.randn(shape[::2] if name == "unbatched" else shape, dtype=dtype).requires_grad_()

    query = made(ROWS, WIDTH)
    if name == "cross":
        return [query, made(COLUMNS, WIDTH), made(COLUMNS, WIDTH)]
    if name == "cross_shared_values":
        key = made(COLUMNS, WIDTH)
        return [query, key, key]
    if name == "other_widths":
        return [query, made(COLUMNS, 20), made(COLUMNS, 12)]
    return [query, query, query]


def _pair(name: str, settings: LayerSettings, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(WIDTH, HEADS, dtype=dtype, **CALLS[name][0])
    ours = mn.MultiheadAttention(WIDTH, HEADS, dtype=dtype, settings=settings, **CALLS[name][0])
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def _run(layer: nn.Module, name: str, inputs: list[Tensor]) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    torch.manual_seed(2)
    y, seen = layer(*inputs, **{"need_weights": False, **CALLS[name][1]})
    chosen = {id(each): each for each in [*inputs, *layer.parameters()]}
    total = (y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum()
    if seen is not None:
        total = total + (seen * torch.linspace(1, 2, seen.numel()).view_as(seen)).sum()
    return y, seen, list(torch.autograd.grad(total, list(chosen.values())))


@pytest.mark.parametrize("name", list(CALLS))
def test_output_bits_and_near_gradient(name: str) -> None:
    ours, plain = _pair(name, FINE)
    y, seen, found = _run(ours, name, _inputs(name))
    expected, expected_seen, wanted = _run(plain, name, _inputs(name))
    assert torch.equal(y, expected)
    assert seen is expected_seen is None or torch.equal(known(seen), known(expected_seen))
    apart = sum(float((a - b).square().sum()) for a, b in zip(found, wanted, strict=True))
    assert 0 < apart < 3e-4 * sum(float(b.square().sum()) for b in wanted)


@pytest.mark.parametrize("name", list(CALLS))
def test_formula_is_pytorchs_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = _pair(name, FINE, torch.float64)
    raw = known(Spec.of(FINE, 0))
    monkeypatch.setattr(Spec, "of", lambda settings, least: raw._replace(levels=0))
    _, _, found = _run(ours, name, _inputs(name, torch.float64))
    _, _, wanted = _run(plain, name, _inputs(name, torch.float64))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["self", "self_weights", "padding_weights"])
def test_autocast_output_bits(name: str) -> None:
    ours, plain = _pair(name, FINE)
    with torch.autocast("cpu", torch.bfloat16):
        y, _, _ = _run(ours, name, _inputs(name))
        expected, _, _ = _run(plain, name, _inputs(name))
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)


@pytest.mark.parametrize("extra", ["add_bias_kv", "add_zero_attn"])
def test_rare_arguments_stay_plain_and_say_so(extra: str) -> None:
    rare: dict[str, Any] = {extra: True}
    layer = mn.MultiheadAttention(WIDTH, HEADS, **rare)
    x = _inputs("self")
    notice._given.clear()
    with pytest.warns(UserWarning, match="multi_head_attention_forward.*have no formula"):
        warned = layer(*x)[0]
    assert torch.equal(warned, nn.MultiheadAttention.forward(layer, x[0], x[1], x[2])[0])


def test_wrong_shapes_raise_pytorchs_error() -> None:
    with pytest.raises(AssertionError, match="expecting embedding dimension"):
        mn.MultiheadAttention(WIDTH, HEADS)(*[torch.randn(ROWS, COUNT, 2 * WIDTH)] * 3)


def test_frozen_layer_and_input_keep_nothing() -> None:
    layer = mn.MultiheadAttention(WIDTH, HEADS).requires_grad_(False)
    y, _ = layer(*[torch.randn(ROWS, COUNT, WIDTH)] * 3)
    assert y.grad_fn is None


def test_traces_in_one_graph() -> None:
    ours, plain = _pair("self", FINE)
    x = _inputs("self")[0]
    compiled: Any = torch.compile(ours, fullgraph=True, backend="aot_eager")
    y = compiled(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(y, plain(x, x, x, need_weights=False)[0])
    y.sum().backward()
    assert x.grad is not None
