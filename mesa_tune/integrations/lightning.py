"""`MesaTuneCallback` for `lightning.pytorch.Trainer`.

What is hard: the loss of a LightningModule is inside `training_step`, which is no forward of a module. So its
calls outside the module's parts count as the loss, and it must run once more, without logging, to measure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from mesa_tune.errors import MissingPackageError, PolicyError, RunError
from mesa_tune.integrations.compression import AUTOCAST, Compression, Training, fresh_loader
from mesa_tune.notice import warn_once
from mesa_tune.policy import Policy

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ImportError as error:
    raise MissingPackageError("mesa_tune.integrations.lightning", "lightning") from error


class MesaTuneCallback(Callback):
    """Compress the activations of a LightningModule from before its first step until the training ends.

    `MesaTuneCallback("policy.txt")`, also a `Policy` or a policy file's text, or
    `MesaTuneCallback(budget="6GB")`: before the first step, `mt.auto` then searches a policy on random
    batches of the training's dataset, with further options such as `run="mesa-run"` or `trials=0`. After
    50, 100, 200, 400, ... steps `mt.Monitor` reads the noise ratio and, where it has outgrown the plan,
    solves that again within the same budget. With `retune=1000`, `mt.Retune` measures instead, and again
    every 1000 optimizer steps. If memory runs out, `mt.explain_oom` says why, unless `explain_oom=False`.

    The policy is for the LightningModule, whose names begin with those of its attributes (`net.fc1`), or for
    its part `module` (`module="net"`, names such as `fc1`). What `training_step` calls itself is named
    `loss.*`. The policy's file with a digest of its text (`mesa/policy`) goes to the hyperparameters of the
    loggers, its predictions to their metrics (`mesa/peak_bytes`, `mesa/saved_bytes`, `mesa/gradient_error`,
    `mesa/noise_ratio`), once per policy, with readings (`mesa/measured_noise_ratio`,
    `mesa/measured_worst_own_ratio`) when they are made. Checkpoints have the plain model, and the callback's
    own state, by which a resumed training is bitwise equal.

    Raise PolicyError for a policy that does not fit the model, and for neither or both of policy and budget.
    """

    def __init__(
        self,
        policy: Policy | str | Path | None = None,
        *,
        budget: int | str | None = None,
        retune: int | None = None,
        module: str = "",
        explain_oom: bool = True,
        **search: Any,
    ) -> None:
        if module and budget is not None:
            raise PolicyError(
                "module: a budget is for the whole LightningModule\ngive a policy, or no module"
            )
        self.compression = Compression(policy, budget, retune, search, explain=explain_oom)
        self.module = module
        self._steps = 0
        self._patches = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Convert the module, and enter the policy around its `training_step`."""
        if self.compression.budget is not None and not pl_module.automatic_optimization:
            raise RunError(
                "budget: with manual optimization, training_step is more than the loss that is measured\n"
                "give MesaTuneCallback a policy, made with a model.py that has step(model, batch, optimizer)"
            )
        self._patches.close()
        self._steps = trainer.global_step
        training = Training(
            pl_module.get_submodule(self.module),
            _loss_of(trainer, pl_module),
            lambda: fresh_loader(trainer.train_dataloader),
            trainer.optimizers[0],
            trainer.accumulate_grad_batches,
            AUTOCAST.get(str(trainer.precision)),
            trainer.global_step,
            getattr(pl_module, "_compiler_ctx", None) is not None,
        )
        self.compression.start(training)
        if pl_module.automatic_optimization:
            step = self._compressing(pl_module.training_step)
            self._patches.enter_context(patch.object(pl_module, "training_step", step))
        else:
            warn_once("mesa-tune: with manual optimization, calls of training_step itself stay exact")
        self._log(trainer, self.compression.logs())

    def _compressing(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(training_step)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.compression.compressing_loss():
                return training_step(*args, **kwargs)

        return run

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Drop the gradients of the last step, which Lightning would do only after the forward.

        The measured step has none in its forward either. A budget would not be met with them.
        """
        if self.compression.budget is not None and trainer.accumulate_grad_batches == 1:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure again if it is time to."""
        self.compression.saw(batch)
        if trainer.global_step == self._steps:
            return  # gradients accumulate
        self._steps = trainer.global_step
        if numbers := self.compression.stepped():
            self._log(trainer, numbers)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the module plain again."""
        self._patches.close()
        self.compression.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Make the module plain again."""
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> dict[str, Any]:
        """Return what resumes the training bitwise equal."""
        return dict(self.compression.state_dict() or {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint, for the training that starts next."""
        self.compression.saved = state_dict

    @staticmethod
    def _log(trainer: Trainer, numbers: dict[str, Any]) -> None:
        policy = {"mesa/policy": numbers.pop("mesa/policy")}
        for logger in trainer.loggers:
            logger.log_hyperparams(policy)
            if numbers:
                logger.log_metrics(numbers, step=trainer.global_step)


def _loss_of(trainer: Trainer, pl_module: LightningModule) -> Callable[[nn.Module, Any], Tensor]:
    """Return `training_step` as a function of a module and a batch, which logs nothing."""
    step = pl_module.training_step
    takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        batch = trainer.strategy.batch_to_device(batch)
        with trainer.precision_plugin.train_step_context(), patch.object(pl_module, "log", _ignored):
            output: Any = step(batch, 0) if takes_index else step(batch)
        result: Tensor = output["loss"] if isinstance(output, Mapping) else output
        return result

    return loss


def _ignored(*args: Any, **kwargs: Any) -> None:
    """Stand for `LightningModule.log` while the module is measured."""
