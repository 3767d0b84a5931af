"""`convert` for training loops with Hugging Face's Accelerate.

What is hard: `Accelerator.prepare` wraps the model and its loader, and `save_state` saves only what was
registered. So the model inside the wrappers is converted, its compression is registered, and measurements
draw batches of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from mesa_tune.errors import MissingPackageError, PolicyError
from mesa_tune.integrations.compression import AUTOCAST, Compression, Training, fresh_loader
from mesa_tune.policy import Policy

try:
    from accelerate import Accelerator
except ImportError as error:
    raise MissingPackageError("mesa_tune.integrations.accelerate", "accelerate") from error


def convert(
    accelerator: Accelerator,
    model: nn.Module,
    policy: Policy | str | Path | None = None,
    *,
    budget: int | str | None = None,
    batches: Any = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    **search: Any,
) -> nn.Module:
    """Convert `model` in place, and return it, for a training that `accelerator` runs.

    Before or after `prepare`. `policy`: a `Policy`, the path of a policy file, or its text. Or `budget`,
    `batches`, `loss(model, batch)` and `optimizer`: `mt.auto` then searches a policy, with its options as
    `search`. Of a DataLoader random batches are drawn; its own order stays. What is sharded or compiled by
    `prepare` must be given before it. The model is then put on its device, as `prepare` does.

    `accelerator.save_state` and `load_state` then also have the state of the compression, so that a resumed
    training is bitwise equal. Call it once per model, with the same arguments in both trainings, or then with
    the policy that a budget gave, and before `load_state`. Trackers that are initialized get the policy's
    file with a digest of its text (`mesa/policy`) and its predictions (`mesa/peak_bytes`, `mesa/saved_bytes`,
    `mesa/gradient_error`, `mesa/noise_ratio`).

    Raise PolicyError for a policy that does not fit the model, and for neither or both of policy and budget.
    """
    compression = Compression(policy, budget, search=search)
    if budget is not None and (loss is None or batches is None or optimizer is None):
        raise PolicyError("budget: needs batches, loss and optimizer\ngive those of the training")
    if budget is not None and accelerator.device_placement:
        model.to(accelerator.device)
    compression.start(
        Training(
            accelerator.unwrap_model(model, keep_torch_compile=False),
            loss,
            lambda: fresh_loader(batches) if isinstance(batches, DataLoader) else batches,
            optimizer,
            accelerator.gradient_accumulation_steps,
            AUTOCAST.get(accelerator.mixed_precision),
        )
    )
    accelerator.register_for_checkpointing(compression)
    accelerator.log(compression.logs())
    return model
