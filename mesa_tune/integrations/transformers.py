"""`MesaTuneCallback` for `transformers.Trainer`.

What is hard: the callbacks of a Trainer get its model, but neither its loss nor its `log`. Both belong to the
Trainer, which passes itself to no callback, and is therefore found on the stack of its call.
"""

from __future__ import annotations

import base64
import functools
import inspect
import io
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from mesa_tune.errors import MissingPackageError, RunError
from mesa_tune.integrations.compression import AUTOCAST, Compression, Training, fresh_loader
from mesa_tune.policy import Policy

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise MissingPackageError("mesa_tune.integrations.transformers", "transformers") from error


class MesaTuneCallback(TrainerCallback, ExportableState):
    """Compress the activations of a Trainer's model from before its first step until the training ends.

    `MesaTuneCallback("policy.txt")`, also a `Policy` or a policy file's text, or
    `MesaTuneCallback(budget="6GB")`: before the first step, `mt.auto` then searches a policy on random
    batches of the training's dataset, with further options such as `run="mesa-run"` or `trials=0`. After
    50, 100, 200, 400, ... steps `mt.Monitor` reads the noise ratio and, where it has outgrown the plan,
    solves that again within the same budget. With `retune=1000`, `mt.Retune` measures instead, and again
    every 1000 optimizer steps. If memory runs out, `mt.explain_oom` says why, unless `explain_oom=False`.

    The loss of the Trainer counts as outside the model: rules for `loss.*` compress it. The policy's file
    with a digest of its text (`mesa/policy`) and its predictions (`mesa/peak_bytes`, `mesa/saved_bytes`,
    `mesa/gradient_error`, `mesa/noise_ratio`) go through `Trainer.log` once per policy, readings
    (`mesa/measured_noise_ratio`, `mesa/measured_worst_own_ratio`) when they are made. Checkpoints are those
    of the plain model; `trainer_state.json` has what makes a resumed training bitwise equal.

    Raise PolicyError for a policy that does not fit the model, and for neither or both of policy and budget.
    """

    def __init__(
        self,
        policy: Policy | str | Path | None = None,
        *,
        budget: int | str | None = None,
        retune: int | None = None,
        explain_oom: bool = True,
        **search: Any,
    ) -> None:
        self.compression = Compression(policy, budget, retune, search, explain=explain_oom)
        self._patches = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Convert the model, and enter the policy around the Trainer's loss."""
        self._patches.close()
        trainer = _calling_trainer()
        compute_loss: Callable[..., Any] = trainer.compute_loss

        def loss(model: nn.Module, batch: Any) -> Tensor:
            inputs = trainer._prepare_inputs(dict(batch))
            with trainer.compute_loss_context_manager():
                computed: Tensor = compute_loss(model, inputs)
                return computed

        training = Training(
            kwargs["model"],
            loss,
            lambda: fresh_loader(kwargs["train_dataloader"]),
            kwargs["optimizer"],
            args.gradient_accumulation_steps,
            AUTOCAST.get(trainer.accelerator.mixed_precision),
            state.global_step,
            bool(args.torch_compile),
        )
        # A checkpoint of a Trainer without this callback has no entry, which the next checkpoint needs.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.compression.saved = _decoded(saved["attributes"]["saved"])
        self.compression.start(training)
        self._patches.enter_context(patch.object(trainer, "compute_loss", self._compressing(compute_loss)))
        trainer.log(self.compression.logs())

    def _compressing(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute_loss)
        def run(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self.compression.saw(dict(inputs))  # a copy: a loss of the user's takes the labels out
            with self.compression.compressing_loss():
                return compute_loss(model, inputs, *args, **kwargs)

        return run

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure again if it is time to."""
        if numbers := self.compression.stepped():
            _calling_trainer().log(numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the model and the Trainer plain again."""
        self._patches.close()
        self.compression.stop()

    def state(self) -> dict[str, Any]:
        """Return what `trainer_state.json` has of this callback: its arguments and its state."""
        made, policy = self.compression, self.compression.policy
        args = {"policy": policy.dumps()} if policy else {"budget": made.budget, "retune": made.retune}
        return {"args": args, "attributes": {"saved": _encoded(made.state_dict())}}


def _calling_trainer() -> Trainer:
    """Return the Trainer that called the callback."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    raise RunError(
        "MesaTuneCallback: called by no transformers.Trainer\n"
        "pass it to one: Trainer(…, callbacks=[MesaTuneCallback('policy.txt')])"
    )


def _encoded(state: Mapping[str, Any] | None) -> str | None:
    """Return `state` as text for a JSON file; it may have tensors."""
    if state is None:
        return None
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _decoded(text: str | None) -> dict[str, Any] | None:
    """Return the state that `_encoded` made the text of."""
    if text is None:
        return None
    state: dict[str, Any] = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return state
