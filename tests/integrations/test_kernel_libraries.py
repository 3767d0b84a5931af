"""What has no formula beside what has one: stand-ins of flash-attn and Liger Kernel in a transformer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mesa_tune as mt
from tests.builders import workload
from tests.integrations.kernel_libraries import HEADS, VOCABULARY, WIDTH, Transformer

pytestmark = pytest.mark.usefixtures("without_variants")

BATCH, LENGTH = 8, 32
TOKENS = BATCH * LENGTH
ROWS = 4 * TOKENS * WIDTH
"""Bytes of one hidden state."""

KERNELS = {
    "blocks.0.norm1.LigerRMSNormFunction.0": ROWS + 4 * TOKENS,
    "blocks.0.FlashAttnFunc.0": 4 * ROWS + 4 * TOKENS * HEADS + 16,
    "blocks.0.norm2.LigerRMSNormFunction.0": ROWS + 4 * TOKENS,
    "blocks.0.LigerSiLUMulFunction.0": 4 * ROWS,
    "blocks.1.norm1.LigerRMSNormFunction.0": ROWS + 4 * TOKENS,
    "blocks.1.flash_attn_forward.0": 4 * ROWS + 4 * TOKENS * HEADS,
    "blocks.1.norm2.LigerRMSNormFunction.0": ROWS + 4 * TOKENS,
    "blocks.1.LigerSiLUMulFunction.0": 4 * ROWS,
    "norm.LigerRMSNormFunction.0": ROWS + 4 * TOKENS,
}
FUSED_LOSS = {
    "LigerFusedLinearCrossEntropyFunction.0": 4 * BATCH * (LENGTH - 1) * WIDTH + 4 * VOCABULARY * WIDTH
}


def tokens(count: int) -> Tensor:
    return torch.randint(VOCABULARY, (count, LENGTH))


def loss_of(model: nn.Module, batch: Tensor) -> Any:
    return model(batch)


def step(policy: mt.Policy | None, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradient of `scale` times the loss."""
    torch.manual_seed(0)
    model, batch = Transformer(), tokens(BATCH)
    if policy is not None:
        mt.convert(model, policy)
    loss = loss_of(model, batch)
    (loss * scale if scale != 1 else loss).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), {name: grad for name, grad in gradients.items() if grad is not None}


@pytest.mark.parametrize(("level", "scale"), [(None, 1), (None, 0.5), (16, 0.5), (4, 1)])
def test_kernels_stay_exact_beside_compressed_layers(level: int | None, scale: float) -> None:
    loss, plain = step(None, scale)
    policy = mt.Policy() if level is None else mt.Policy.uniform(level=level)
    converted_loss, converted = step(policy, scale)
    assert torch.equal(converted_loss, loss)
    linear = {name for name in plain if name.endswith(".weight") and plain[name].dim() == 2}
    compressed = linear - {"embed.weight", "head.weight"} if level else set()
    different = {name for name in plain if not torch.equal(converted[name], plain[name])}
    assert compressed == {name for name in different if not name.endswith(".bias")}
    for name in different - compressed:  # a sum over rows in another order
        assert torch.allclose(converted[name], plain[name], rtol=1e-4, atol=1e-6)


def test_a_profile_names_kernels_with_their_bytes() -> None:
    profile = mt.profile(workload(Transformer, tokens, loss_of, batch_size=BATCH), options=[])
    found = {layer.name: layer.own_bytes for layer in profile.layers if layer.index < 0}
    assert found == KERNELS | FUSED_LOSS
    assert {entry.layer for entry in profile.exact} == set(found)
    assert {entry.function for entry in profile.exact} == {name.split(".")[-2] for name in found}
    assert sum(layer.own_bytes for layer in profile.layers) == profile.saved_bytes
    assert not profile.notes


def test_an_estimate_names_kernels_with_their_bytes() -> None:
    rows = mt.estimate(Transformer(fused=False), tokens(BATCH), loss_of).frame()
    sizes = dict(zip(rows["layer"], rows["bytes"], strict=True))
    assert {name: sizes[name] for name in KERNELS} == KERNELS


def test_an_estimate_needs_no_values() -> None:
    with pytest.raises(mt.WorkloadError, match="profile it with real steps"):
        mt.estimate(Transformer(), tokens(BATCH), loss_of)  # the fused loss asks whether its gradient is 1
