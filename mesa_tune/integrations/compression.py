"""`Compression`: what the callbacks of all frameworks do in a training, from its start to its checkpoints.

What is hard: a framework runs the training, and may resume it from a checkpoint. The rounding noise and the
settings of layers must then continue as if it had never stopped, under the policy of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from mesa_tune.autotune import convert_within
from mesa_tune.conversion import compress_saved, convert, revert
from mesa_tune.conversion.model import conversion_of
from mesa_tune.conversion.resume import load_state_dict, state_dict
from mesa_tune.errors import PolicyError, RunError
from mesa_tune.estimation.oom import explain_oom
from mesa_tune.free_memory import AUTO
from mesa_tune.monitor import Monitor, Reading
from mesa_tune.notice import say, warn_once
from mesa_tune.policy import Policy
from mesa_tune.retune import Retune
from mesa_tune.runs.folder import DEFAULT_RUN, Run, digest
from mesa_tune.units import counted, parse_bytes
from mesa_tune.workload.instance.optimizers import warn_of
from mesa_tune.workload.instance.rank_zero import is_rank_zero
from mesa_tune.workload.user_code import seeded

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16", "bf16-mixed": "bfloat16", "16-mixed": "float16"}
"""Names of `Workload.autocast` by those of accelerate and Lightning."""

_PREDICTED = re.compile(r"(peak|saved|gradient error|own noise ratio) ([0-9][0-9.e+-]*)(?: ([kMGT]?B))?")


@dataclass(frozen=True)
class Training:
    """What a framework trains.

    `model`: the module to convert, without the framework's wrappers. For measurements: `loss(model, batch)`,
    the scalar loss of a plain step; `batches()`, an iterable that changes nothing of the training's order;
    `optimizer`, that of the training; `accumulation`, batches per optimizer step; `autocast`, as in
    `Workload`. `step`: optimizer steps taken before, if the training was resumed. `compiled`: whether the
    training runs a compiled `model`.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor] | None
    batches: Callable[[], Any]
    optimizer: Optimizer | None
    accumulation: int = 1
    autocast: str | None = None
    step: int = 0
    compiled: bool = False


class Compression:
    """The compression of one model in a training: by a policy, or by measurements for a budget.

    `policy`: a `Policy`, the path of a policy file, or its text. `budget`: as in `mt.auto`, which also takes
    the options of `search`; a `Monitor` with the remedy "plan" then looks again as it trains. `retune`:
    number of optimizer steps after which `mt.Retune` measures again, in place of both. `explain`: call
    `mt.explain_oom` as it starts. `saved`: the `state_dict` of the checkpoint that a training resumes from,
    or of the training's end.
    """

    def __init__(
        self,
        policy: Policy | str | Path | None = None,
        budget: int | str | None = None,
        retune: int | None = None,
        search: Mapping[str, Any] = MappingProxyType({}),
        *,
        explain: bool = True,
    ) -> None:
        if (policy is None) == (budget is None):
            raise PolicyError("give either a policy or a budget\nsuch as policy='policy.txt' or budget='6GB'")
        if search and (budget is None or retune is not None):
            raise PolicyError(
                f"{', '.join(search)}: options of mt.auto\ngive them with a budget, and without retune"
            )
        if retune is not None and budget is None:
            raise PolicyError("retune measures for a budget\ngive budget in place of policy")
        if budget is not None and (budget != AUTO or retune is not None):
            parse_bytes(budget)
        self.policy = None if policy is None else _policy_of(policy)
        self.budget = budget
        self.retune = retune
        self.search, self.explain = search, explain
        self.model: nn.Module | None = None
        self.saved: Mapping[str, Any] | None = None
        self._retuning: Retune | None = None
        self._monitor: Monitor | None = None
        self._batches: list[Any] = []
        self._losses = 0

    @property
    def request(self) -> str:
        """What was asked for, as text: the policy file or the budget."""
        return f"budget {self.budget}" if self.policy is None else self.policy.dumps()

    def start(self, training: Training) -> None:
        """Convert the model before the first step; a resumed training goes on as `saved` says.

        With another policy or budget than that of `saved`, start anew, and warn. The policy that a budget
        gave is no other one.
        """
        if self.explain:
            explain_oom()
        self.model, self._losses = revert(training.model), 0
        warn_of(training.optimizer)
        self._retuning = self._make_retuning(training)
        saved = self.saved if training.step else None
        resumed = saved is not None and self._resume(training.model, saved)
        if not resumed:
            self._convert(training)
        self._monitor = self._make_monitor(training)
        if saved is not None and resumed:
            self._take_over(saved)

    def _make_monitor(self, training: Training) -> Monitor | None:
        """Return the monitor of a budget's plan; None where nothing is compressed or measured."""
        policy = self._current()
        if self.budget is None or self.retune is not None or policy is None or not policy.rules:
            return None
        assert training.loss is not None
        run = self.search.get("run", DEFAULT_RUN)
        try:
            monitor = Monitor(training.model, training.loss, remedy="plan", run=run)
        except RunError as error:
            self._say(f"the noise ratio is not read while it trains: {error}")
            return None
        monitor.steps = training.step
        monitor.may_convert &= not training.compiled
        return monitor

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on as in a checkpoint that is loaded after the start; None: its model was plain."""
        if self.model is not None and state is not None and self._resume(self.model, state):
            self._take_over(state)

    def _take_over(self, state: Mapping[str, Any]) -> None:
        if self._monitor is not None and state.get("monitor"):
            self._monitor.load_state_dict(state["monitor"])

    def _resume(self, model: nn.Module, saved: Mapping[str, Any]) -> bool:
        """Convert with the policy of a checkpoint, in its state; warn and return False if it had another."""
        policy = Policy.parse(saved["policy"], source="the checkpoint")
        if saved["request"] != self.request and policy not in self._alike():
            warn_once("mesa-tune: the checkpoint has another policy or budget, so its rounding starts anew")
            return False
        convert(model, policy)
        load_state_dict(model, saved["compression"])
        self._losses = saved["losses"]
        if self._retuning is not None:
            self._retuning.policy = policy
        return True

    def _alike(self) -> tuple[Policy, ...]:
        """Return what the policy may be in a checkpoint: itself, or as it binds attention."""
        return () if self.policy is None else (self.policy, self.policy.bind_attention())

    def _convert(self, training: Training) -> None:
        if self.policy is not None:
            convert(training.model, self.policy)
            self._say(f"activations are stored by {self.policy.source}{_in_brackets(self.policy)}")
        elif self._retuning is not None:
            self.saw(_first(training))
            self.stepped()
        else:
            assert training.loss is not None
            convert_within(
                training.model,
                training.batches(),
                training.loss,
                budget=self.budget,
                optimizer=training.optimizer,
                autocast=training.autocast,
                accumulation=training.accumulation,
                **self.search,
            )

    def _make_retuning(self, training: Training) -> Retune | None:
        if self.budget is None or self.retune is None:
            return None
        retuning = Retune(
            training.model, training.loss, self.budget, every=self.retune, optimizer=training.optimizer
        )
        retuning.steps = training.step and training.step + 1  # the call before the first step counts
        return retuning

    def saw(self, batch: Any) -> None:
        """Note a batch of the optimizer step that comes, or a micro-batch, for a measurement after it."""
        if self._retuning is not None:
            self._batches = [batch]  # it measures one
        elif self._monitor is not None and self._monitor.is_next_due:
            self._batches.append(batch)

    def stepped(self) -> dict[str, Any]:
        """Note an optimizer step on the batches seen; return what to log if the model was measured again."""
        batches, self._batches = self._batches, []
        if self._monitor is not None:
            reading = self._monitor.step(*batches)
            return {} if reading is None else {**self.logs(), **_read(reading)}
        if self._retuning is None or not self._retuning.step(batches[-1]):
            return {}
        if self._retuning.plan is not None:
            self._say(self._retuning.plan.summary)
        return self.logs()

    @staticmethod
    def _say(text: str) -> None:
        """Write a line for the user, in one process of those that train together."""
        if is_rank_zero():
            say(text)

    def stop(self) -> None:
        """Make the model plain again."""
        self.saved = self.state_dict()
        if self.model is not None:
            revert(self.model)

    def compressing_loss(self) -> AbstractContextManager[None]:
        """Return the context of a loss: it stores what calls outside the model save by the policy.

        Its rounding noise depends on the number of losses in this training, not in this process.
        """
        policy = self._current() if torch.is_grad_enabled() else None
        if policy is None:
            return nullcontext()
        self._losses += 1
        return compress_saved(policy, seed=torch.initial_seed() + self._losses)

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return what a checkpoint needs to resume; `saved` while the model is plain."""
        policy = self._current()
        if self.model is None or policy is None:
            return self.saved
        return {
            "request": self.request,
            "policy": policy.dumps(),
            "losses": self._losses,
            "compression": state_dict(self.model),
            "monitor": self._monitor and self._monitor.state_dict(),
        }

    def logs(self) -> dict[str, Any]:
        """Return which policy it is, and what its header predicts: bytes, gradient error, noise ratio."""
        policy = self._current() or Policy()
        return {"mesa/policy": self._named(policy), **predicted(policy.header.predicted or "")}

    def _named(self, policy: Policy) -> str:
        """Return the file of `policy`, if it has one, the number of its rules, and a digest of its text."""
        if not policy.rules:
            return "nothing is compressed"
        name = f"{counted(len(policy.rules), 'rule')}, digest {digest(policy.dumps())[:6]}"
        path = Run(Path(self.search.get("run", DEFAULT_RUN))).policy
        path = path if self.policy is None else Path(self.policy.source)
        with suppress(PolicyError):
            return f"{path} ({name})" if Policy.load(path) == policy else name
        return name

    def _current(self) -> Policy | None:
        conversion = None if self.model is None else conversion_of(self.model)
        return None if conversion is None else conversion.policy


def predicted(text: str) -> dict[str, float]:
    """Return the numbers of `predicted:` in the header of a policy file, under names for logs."""
    numbers: dict[str, float] = {}
    for name, number, unit in _PREDICTED.findall(text):
        key = f"mesa/{name.removeprefix('own ').replace(' ', '_')}" + ("_bytes" if unit else "")
        numbers[key] = float(parse_bytes(f"{number}{unit}").bytes or 0) if unit else float(number)
    return numbers


def _read(reading: Reading) -> dict[str, float]:
    """Return what a reading measured, under names for logs."""
    numbers = {"noise_ratio": reading.noise_ratio, "worst_own_ratio": reading.worst_own_ratio}
    return {f"mesa/measured_{name}": number for name, number in numbers.items() if number is not None}


def _in_brackets(policy: Policy) -> str:
    """Return what the header of `policy` predicts; nothing if it does not say."""
    return f" (predicted {policy.header.predicted})" if policy.header.predicted else ""


def fresh_loader(loader: Any) -> DataLoader[Any]:
    """Return a loader of random batches of the dataset of `loader`, whose sampler it leaves alone.

    An iterable dataset is read from its beginning. Raise RunError if `loader` is no DataLoader with batches.
    """
    size = getattr(loader, "batch_size", None) or getattr(
        getattr(loader, "batch_sampler", None), "batch_size", None
    )
    if not isinstance(loader, DataLoader) or size is None:
        raise RunError(
            f"budget: {type(loader).__name__} is no DataLoader with a batch size\n"
            "a search measures its batches: train with one, or give a policy in place of a budget"
        )
    return DataLoader(
        loader.dataset,
        size,
        shuffle=not isinstance(loader.dataset, IterableDataset),
        generator=torch.Generator().manual_seed(0),
        collate_fn=loader.collate_fn,
    )


def _first(training: Training) -> Any:
    """Return a first batch; the random states stay as they are."""
    device = next((parameter.device for parameter in training.model.parameters()), "cpu")
    with seeded(0, str(device)):
        return next(iter(training.batches()))


def _policy_of(policy: Policy | str | Path) -> Policy:
    if isinstance(policy, Policy):
        return policy
    return Policy.parse(text) if "\n" in (text := str(policy)) else Policy.load(policy)
