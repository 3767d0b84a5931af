"""Check that a policy does not change the forward, and `revert` restores the model; measure gradient errors.

The gradient error compares two whole backward passes. Both start from the same torch seed, so that dropout
drops the same elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from meters import loss_under
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import mesa_tune as mt

TORCH_SEED = 11


class StepResult(NamedTuple):
    """Results of one forward and backward: outputs with the loss, random state and buffers, gradients."""

    outputs: list[Tensor]
    states: list[Tensor]
    gradients: list[Tensor]


def step(
    workload: mt.Workload, model: nn.Module, batch: Any, policy: mt.Policy | None, seed: int = 0
) -> StepResult:
    """Run a forward and a backward from `TORCH_SEED`; `seed` is the rounding seed of the loss."""
    outputs: list[Tensor] = []
    handle = model.register_forward_hook(lambda module, inputs, output: outputs.extend(_tensors(output)))
    model.zero_grad(set_to_none=True)
    torch.manual_seed(TORCH_SEED)
    loss = loss_under(workload, policy, seed)(model, batch)
    handle.remove()
    states = [torch.get_rng_state(), *(buffer.clone() for buffer in model.buffers())]
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return StepResult([loss.detach(), *outputs], states, gradients)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf.detach().clone() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def differences(workload: mt.Workload, policy: mt.Policy) -> list[str]:
    """Return what differs from the plain model in a step under `policy` or after `revert`: best nothing."""
    batch = workload.make_batch()
    plain_model = workload.build()
    keys = list(plain_model.state_dict())
    plain = step(workload, plain_model, batch, None)
    model = mt.convert(workload.build(), policy, seed=0)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    converted = step(workload, model, batch, policy)
    pairs = {"outputs": (plain.outputs, converted.outputs), "left behind": (plain.states, converted.states)}
    different = _different(pairs)
    different += [] if list(model.state_dict()) == keys else ["state_dict keys"]
    model.load_state_dict(start)
    again = step(workload, mt.revert(model), batch, None)
    names = ["outputs", "behind", "gradients"]
    return different + _different(
        {f"reverted {name}": pair for name, *pair in zip(names, plain, again, strict=True)}
    )


def _different(pairs: Mapping[str, Any]) -> list[str]:
    return [name for name, (first, second) in pairs.items() if not _equal(first, second)]


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def errors(workload: mt.Workload, policies: Mapping[str, mt.Policy], seeds: int) -> dict[str, Any]:
    """Return ‖ĝ − g‖² / ‖g‖² over all parameters, for each policy and rounding seed, and the means."""
    model, batch = workload.build(), workload.make_batch()
    exact = step(workload, model, batch, None).gradients
    results = {}
    for name, policy in policies.items():
        values = []
        for seed in range(seeds):
            mt.convert(model, policy, seed=1000 + seed)
            values.append(_error(step(workload, model, batch, policy, 1000 + seed).gradients, exact))
        results[name] = {"mean": sum(values) / seeds, "seeds": values}
    mt.revert(model)
    return results


def _error(gradients: list[Tensor], exact: list[Tensor]) -> float:
    squared = sum(float((a - b).double().square().sum()) for a, b in zip(gradients, exact, strict=True))
    return squared / sum(float(gradient.double().square().sum()) for gradient in exact)
