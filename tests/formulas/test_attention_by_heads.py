"""Attention's backward a head at a time: the gradients of the forward run again, packed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.formulas.attention import by_heads as attention_by_heads
from tests.step_memory import Composed

BATCH, TOKENS, HEADS, WIDTH = 9, 37, 4, 16


def projected_attention(split: Callable[[Tensor], Any], **arguments: Any) -> nn.Module:
    """Attention over queries, keys and values that `split` makes of one projection."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*split(model.projection(x)), **arguments)

    return Composed(forward, projection=nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH))


def of_one_tensor(x: Tensor) -> Any:
    return x.view(*x.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)


def of_their_own(x: Tensor) -> Any:
    parts = (part.contiguous() for part in x.chunk(3, -1))
    return [part.view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2) for part in parts]


def fewer_queries(x: Tensor) -> Any:
    q, k, v = of_their_own(x)
    return q[:, :, :11].contiguous(), k, v


def grouped(x: Tensor) -> Any:
    q, k, v = of_their_own(x)
    return q, k[:, : HEADS // 2], v[:, : HEADS // 2]


SPLITS = {"one": of_one_tensor, "own": of_their_own, "oblong": fewer_queries}


def gradients(
    block: nn.Module,
    level: int | None,
    monkeypatch: pytest.MonkeyPatch,
    by_heads: bool = True,
    tokens: int = TOKENS,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Of the input and the weights; without `by_heads` the forward runs again."""
    monkeypatch.setattr(attention_by_heads, "_NATIVE", by_heads)
    torch.manual_seed(1)
    x = torch.randn(BATCH, tokens, HEADS * WIDTH, requires_grad=True)
    block.zero_grad()
    if level is not None:
        mt.convert(block, mt.Policy.uniform(level=level), seed=1, min_elements=0)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        y = block(x)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    mt.revert(block)
    return torch.cat([each.grad.flatten() for each in (x, *block.parameters()) if each.grad is not None])


def shuts_a_row() -> Tensor:
    mask = torch.rand(BATCH, 1, TOKENS, TOKENS) > 0.4
    mask[2, :, 5] = False
    return mask


MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "bool": lambda: {"attn_mask": shuts_a_row()},
    "float": lambda: {"attn_mask": torch.randn(HEADS, 1, TOKENS)},
}
PAIRS = [(name, mask) for name in SPLITS for mask in MASKS if (name, mask) != ("oblong", "bool")]


@pytest.mark.parametrize(
    ("name", "mask", "heads"),
    [*((*pair, 8) for pair in PAIRS), *(("own", mask, heads) for mask in MASKS for heads in (1, 1000))],
)
def test_the_gradients_are_those_of_the_forward_run_again(
    name: str, mask: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_by_heads, "HEADS_A_THREAD", heads)
    torch.manual_seed(0)
    block = projected_attention(SPLITS[name], scale=0.3, **MASKS[mask]())
    found, again = (gradients(block, 16, monkeypatch, by_heads) for by_heads in (True, False))
    assert (found - again).norm() < 2e-6 * again.norm()


@pytest.mark.parametrize(
    ("name", "mask", "tokens", "dtype"),
    [
        *((*pair, TOKENS, torch.bfloat16) for pair in PAIRS),
        *((*pair, TOKENS, torch.float16) for pair in PAIRS if "own" in pair),
        *((name, mask, TOKENS - 1, torch.bfloat16) for name in SPLITS for mask in ("none", "causal")),
    ],
    ids=str,
)
def test_gradients_of_16_bits_are_computed_in_32(
    name: str, mask: str, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_by_heads, "_has_matrix_unit", lambda: False)
    torch.manual_seed(0)
    block = projected_attention(SPLITS[name], scale=0.3, **MASKS[mask]())
    exact = gradients(block, 256, monkeypatch, tokens=tokens)
    found, again = (gradients(block, 256, monkeypatch, by_heads, tokens, dtype) for by_heads in (True, False))
    assert (found - again).norm() < 0.03 * again.norm()
    assert (found - exact).norm() < 1.1 * (again - exact).norm()


@pytest.mark.parametrize("tokens", [36, 37])
def test_parts_are_decoded_by_the_sample(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, counts = SavedTensor.samples, []

    def counted(self: SavedTensor, each: int, dtype: torch.dtype) -> Iterator[Tensor]:
        for place, some in enumerate(samples(self, each, dtype)):
            whole = self.whole()[place * each : (place + 1) * each]
            assert torch.equal(some, whole)
            counts.append(whole.shape[0])
            yield some

    monkeypatch.setattr(SavedTensor, "samples", counted)
    torch.manual_seed(0)
    gradients(projected_attention(of_their_own), 16, monkeypatch, tokens=tokens)
    # 36 tokens: a thread takes at least 16 heads, those of 4 samples, and at most half of the 9 samples.
    # 37 tokens: a sample has 37 x 64 elements, 9.25 groups of 256, so 4 samples are the fewest.
    assert counts == [min(4, BATCH - first) for first in range(0, BATCH, 4) for _ in range(3)]


UNSERVED: dict[str, Callable[[], nn.Module]] = {
    "a mask that wants a gradient": lambda: projected_attention(
        of_their_own, attn_mask=torch.zeros(TOKENS, TOKENS, requires_grad=True)
    ),
    "fewer heads than threads": lambda: projected_attention(lambda x: [h[:1, :1] for h in of_their_own(x)]),
    "grouped heads": lambda: projected_attention(grouped, enable_gqa=True),
}


@pytest.mark.parametrize("name", list(UNSERVED))
def test_what_it_does_not_serve_runs_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(attention_by_heads, "gradients", refused)
    torch.manual_seed(0)
    gradients(UNSERVED[name](), 16, monkeypatch)
    with pytest.raises(AssertionError):
        gradients(projected_attention(of_their_own), 16, monkeypatch)


@pytest.mark.parametrize("mask", list(MASKS))
def test_dropout_is_that_of_the_forward(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    block = projected_attention(of_their_own, dropout_p=0.2, **MASKS[mask]())
    plain = gradients(block, None, monkeypatch)
    fine = gradients(block, 256, monkeypatch)
    assert (fine - plain).norm() < 0.02 * plain.norm()
    coarse, at_once = (gradients(block, 16, monkeypatch, by_heads) for by_heads in (True, False))
    assert (coarse - at_once).norm() < 2e-6 * at_once.norm()


@pytest.mark.parametrize("by_heads", [True, False])
def test_dropout_of_everything_gives_zeros(by_heads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    assert not gradients(projected_attention(of_their_own, dropout_p=1.0), 16, monkeypatch, by_heads).any()
