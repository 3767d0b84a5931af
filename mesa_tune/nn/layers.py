"""torch's layers with `settings`: how each stores what it keeps for backward.

Each *is* its twin (arguments, parameters, `state_dict` keys, outputs); only the calls that its forward makes
go to our functions, by the layer's settings. Inside a converted model the policy decides, and `settings`
rest.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.functional import products
from mesa_tune.functional.public import StandingAlone, policy_at_work
from mesa_tune.settings import LayerSettings


class _Settled(nn.Module):
    """Takes `settings` beside the twin's arguments, and runs the twin's forward by them."""

    def __init__(self, *args: Any, settings: LayerSettings | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = LayerSettings() if settings is None else settings

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if policy_at_work() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with StandingAlone(self.settings):
            return forward(*args, **kwargs)

    def extra_repr(self) -> str:
        """The twin's description, and the settings."""
        return ", ".join(part for part in (super().extra_repr(), f"settings={self.settings.label}") if part)


class Linear(_Settled, nn.Linear):
    """`nn.Linear`; keeps the input."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._run(super().forward, input)
        return result


class Conv1d(_Settled, nn.Conv1d):
    """`nn.Conv1d`; keeps the input."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._run(super().forward, input)
        return result


class Conv2d(_Settled, nn.Conv2d):
    """`nn.Conv2d`; keeps the input."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._run(super().forward, input)
        return result


class Conv3d(_Settled, nn.Conv3d):
    """`nn.Conv3d`; keeps the input."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._run(super().forward, input)
        return result


class BatchNorm1d(_Settled, nn.BatchNorm1d):
    """`nn.BatchNorm1d`; keeps the normalized input."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._run(super().forward, input)
        return result


class BatchNorm2d(_Settled, nn.BatchNorm2d):
    """`nn.BatchNorm2d`; keeps the normalized input."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._run(super().forward, input)
        return result


class BatchNorm3d(_Settled, nn.BatchNorm3d):
    """`nn.BatchNorm3d`; keeps the normalized input."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._run(super().forward, input)
        return result


class LayerNorm(_Settled, nn.LayerNorm):
    """`nn.LayerNorm`; keeps the normalized input."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._run(super().forward, input)
        return result


class GELU(_Settled, nn.GELU):
    """`nn.GELU`; keeps the input."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._run(super().forward, input)
        return result


class ReLU(_Settled, nn.ReLU):
    """`nn.ReLU`; keeps one exact bit an element."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._run(super().forward, input)
        return result


class Softmax(_Settled, nn.Softmax):
    """`nn.Softmax`; keeps the output."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._run(super().forward, input)
        return result


class MatMul(_Settled, products.MatMul):
    """`input @ other` as a layer; keeps each operand whose partner wants a gradient."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        result: Tensor = self._run(super().forward, input, other)
        return result


class CrossEntropyLoss(_Settled, nn.CrossEntropyLoss):
    """`nn.CrossEntropyLoss`; keeps the logits."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        result: Tensor = self._run(super().forward, input, target)
        return result


class MultiheadAttention(_Settled, nn.MultiheadAttention):
    """`nn.MultiheadAttention`; keeps its inputs, queries, keys, values and result."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        masks = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        result: tuple[Tensor, Tensor | None] = self._run(super().forward, query, key, value, *masks)
        return result
