"""The expected error of a gradient whose rows are sampled: over all samples, not of one.

What is hard: few rows may make most of a gradient. A sample without them errs little, and the rare sample
with one of them, divided by a small probability, errs a hundred times more. Of 12 batches of a Llama-style
model, 11 had errors of 0.03 to 0.08, and one of 3.1. So a price from single samples is too low, almost
always, and a search finds the layers of which it is. But the expectation over samples is a sum over rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mesa_tune.codecs import Spec, rows
from mesa_tune.ops.reference.sampling import UNIT, row_probabilities


def expected_square(x: Tensor, decoded: Tensor, grad: Tensor, spec: Spec) -> float:
    """Return E ‖Σ gᵢᵀ (x̂ᵢ − xᵢ)‖² over samples of the rows xᵢ of `x`, as if they were independent.

    It is Σ ((1 + ε) / pᵢ − 1) ‖gᵢ‖² ‖xᵢ‖², where ε is the relative squared error of rounding, that of the
    rows of `decoded`. `x`: `(*, in)`, `grad`: `(*, out)`, with a row for each of `x`.
    """
    given, made, gradients = (tensor.detach().flatten(0, -2).float() for tensor in (x, decoded, grad))
    norms = torch.linalg.vector_norm(given, dim=-1)
    parts = row_probabilities(norms, rows.stored_count(x.shape, spec)).double() / UNIT
    whole = (norms.square() * gradients.square().sum(-1)).double()
    kept = made.any(-1)
    exact = given[kept] / parts[kept, None].float()
    size = float(exact.square().sum())
    rounding = float((made[kept] - exact).square().sum()) / size if size else 0.0
    return float((((1 + rounding) / parts - 1) * whole).sum())
