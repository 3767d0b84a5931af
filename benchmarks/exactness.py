"""Whether a policy leaves the forward as it is and `revert` the model, bit for bit; and the gradient's error.

Relative squared error by two whole backwards from one torch seed, so that dropout falls alike.
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


class Step(NamedTuple):
    """What one forward and backward gives: outputs and loss, what it leaves behind, and gradients."""

    outputs: list[Tensor]
    behind: list[Tensor]
    gradients: list[Tensor]


def step(
    workload: mt.Workload, model: nn.Module, batch: Any, policy: mt.Policy | None, seed: int = 0
) -> Step:
    """A forward and a backward from the same torch seed; `seed` is that of the loss's rounding."""
    outputs: list[Tensor] = []
    handle = model.register_forward_hook(lambda module, given, output: outputs.extend(_tensors(output)))
    model.zero_grad(set_to_none=True)
    torch.manual_seed(TORCH_SEED)
    loss = loss_under(workload, policy, seed)(model, batch)
    handle.remove()
    behind = [torch.get_rng_state(), *(buffer.clone() for buffer in model.buffers())]
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return Step([loss.detach(), *outputs], behind, gradients)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf.detach().clone() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def differences(workload: mt.Workload, policy: mt.Policy) -> list[str]:
    """What a step under `policy`, or one after `revert`, does otherwise than the plain model's: nothing."""
    batch = workload.make_batch()
    plain_model = workload.build()
    names = list(plain_model.state_dict())
    plain = step(workload, plain_model, batch, None)
    model = mt.convert(workload.build(), policy, seed=0)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ours = step(workload, model, batch, policy)
    found = _apart({"outputs": (plain.outputs, ours.outputs), "left behind": (plain.behind, ours.behind)})
    found += [] if list(model.state_dict()) == names else ["state_dict keys"]
    model.load_state_dict(start)
    again = step(workload, mt.revert(model), batch, None)
    return found + _apart(
        {f"reverted {name}": pair for name, *pair in zip(Step._fields, plain, again, strict=True)}
    )


def _apart(pairs: Mapping[str, Any]) -> list[str]:
    return [name for name, (here, there) in pairs.items() if not _equal(here, there)]


def _equal(here: list[Tensor], there: list[Tensor]) -> bool:
    return len(here) == len(there) and all(map(torch.equal, here, there))


def errors(workload: mt.Workload, policies: Mapping[str, mt.Policy], seeds: int) -> dict[str, Any]:
    """‖ĝ − g‖² / ‖g‖² over all parameters, of each policy on each rounding seed, and their mean."""
    model, batch = workload.build(), workload.make_batch()
    exact = step(workload, model, batch, None).gradients
    found = {}
    for name, policy in policies.items():
        values = []
        for seed in range(seeds):
            mt.convert(model, policy, seed=1000 + seed)
            values.append(_error(step(workload, model, batch, policy, 1000 + seed).gradients, exact))
        found[name] = {"mean": sum(values) / seeds, "seeds": values}
    mt.revert(model)
    return found


def _error(gradients: list[Tensor], exact: list[Tensor]) -> float:
    apart = sum(
        float((here - there).double().square().sum()) for here, there in zip(gradients, exact, strict=True)
    )
    return apart / sum(float(there.double().square().sum()) for there in exact)
