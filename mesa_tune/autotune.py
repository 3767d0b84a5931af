"""`mt.auto`: profile, search and convert in one call, from inside a training script.

What is hard: the model is the one that will be trained. It must leave as it came, without a second copy of
weights on its device, and a script that runs again must not measure again. Of several processes one measures.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mesa_tune.conversion import convert, revert
from mesa_tune.conversion.model import conversion_of
from mesa_tune.errors import RunError
from mesa_tune.files import dump_json
from mesa_tune.free_memory import AUTO, MARGIN, free_memory
from mesa_tune.measure.memory.meter import bytes_of, gradients_of, tensors_in
from mesa_tune.measure.profiling import profile
from mesa_tune.measure.timing.duration import announcing
from mesa_tune.notice import StatusLine, say
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import EXACT
from mesa_tune.profiles.entries import fast_grid, full_grid
from mesa_tune.profiles.profile import Profile
from mesa_tune.runs.folder import DEFAULT_RUN, MADE_BY, Origin, Run, digest
from mesa_tune.search import Plan, search_policy
from mesa_tune.search.api import plain_fits
from mesa_tune.search.request import check_length, check_request
from mesa_tune.search.restrictions import Pins, Restrictions
from mesa_tune.units import counted, format_bytes
from mesa_tune.workload.instance.fingerprint import fingerprint
from mesa_tune.workload.instance.given_batches import GivenBatches, preserved_generators
from mesa_tune.workload.instance.instance import instance_workload
from mesa_tune.workload.instance.optimizers import unwrapped, warn_of
from mesa_tune.workload.instance.rank_zero import is_rank_zero, require_alone, text_of_rank_zero
from mesa_tune.workload.preserve import set_aside
from mesa_tune.workload.user_code import seeded
from mesa_tune.workload.workload import Workload, in_training_mode

_WRITER = "mt.auto"
BATCHES = 4
"""Batches of a profile: one screens, three price. A script waits for it; `mt.profile` takes three more."""
_WATCHED = 8
"""Forwards that are asked for gradients of the step before: those of two steps of most models."""
_RATES = ("lr", "initial_lr", "params")
"""What changes from step to step in the options of an optimizer."""


def auto(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    budget: int | str | None,
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    run: str | Path = DEFAULT_RUN,
    autocast: str | None = None,
    accumulation: int = 1,
    fast: bool = False,
    timeout: float | None = None,
    **search: Any,
) -> nn.Module:
    """Convert `model`, in place, with the best policy whose training step fits `budget`; return `model`.

    Measure the model as `mt.profile` does and search as `mt.search_policy` does, which takes minutes, and
    write profile.json, plan.json and policy.txt to the folder `run`. A later call with an equal model, loss,
    optimizer, shape of batches and request loads the plan instead; values of weights do not count. If the
    plain step fits the budget, the model stays plain, and a line on standard error says so.

    `batch`: one batch (a tensor, mapping, list, tuple or dataclass, whose first dimension counts samples), an
    iterable of batches such as a DataLoader, or `callable(n)`. Give several batches: how much they differ is
    the gradient noise. Of an iterable, the first 64 are used, or 2 GiB of them; an iterator loses these.
    `loss(model, batch)`: the loss of the training, a scalar, with autocast if the training has it. It must
    not communicate with other processes. `optimizer`: that of the training, which is not touched, or
    `callable(parameters)`; default AdamW. `budget`: as in `search_policy`, or `auto`, what the device has
    free and the model has already, less 10 %; None with `objective="memory"`. `autocast`, `accumulation`: as
    in `Workload`. `fast`: measure 6 settings instead of 25, on one batch. `timeout`: after so many seconds,
    measure nothing further that a plan can do without, and say so; the study has what the profile leaves.
    `search`: further options of `search_policy`, such as `trials=0`, without a study.

    Layers of the loss outside the model (`loss.*`) stay exact, because `convert` does not reach them, unless
    `pins` has settings for them; then put the loss into `mt.compress_saved`. The state of the model, its
    gradients, its training modes and all random generators are the same afterwards, bit for bit. While it is
    measured, a copy of its weights is in host memory. Where torch.distributed is initialized, all processes
    must call; rank 0 measures, the others wait, and all get its plan or its error. Call it before the model
    is compiled or sharded; wrapping in DistributedDataParallel may come before or after.

    Raises:
        BudgetError: not an amount, or not reachable.
        WorkloadError: `batch`, `loss` or `optimizer` fail or return something unusable.
        RunError: files in `run` that `auto` did not write, a model whose steps need all processes.
    """
    convert_within(
        model,
        batch,
        loss,
        budget=budget,
        optimizer=optimizer,
        run=run,
        autocast=autocast,
        accumulation=accumulation,
        fast=fast,
        timeout=timeout,
        **search,
    )
    if conversion_of(model) is not None and is_rank_zero():
        where = "" if Path(run) == DEFAULT_RUN else f', run="{run}"'
        monitor = f'mt.Monitor(model, loss, remedy="plan"{where})'
        say(f"as it trains, look again: monitor = {monitor}, and after each step monitor.step(batch)")
    return model


def convert_within(
    model: nn.Module,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    budget: int | str | None,
    optimizer: Any = None,
    run: str | Path = DEFAULT_RUN,
    autocast: str | None = None,
    accumulation: int = 1,
    fast: bool = False,
    timeout: float | None = None,
    **search: Any,
) -> None:
    """Do what `auto` does, for a training that looks again by itself."""
    inspect.signature(search_policy).bind(None, budget, workload=None, timeout=timeout, **search)
    check_length(search.get("trials"), timeout)
    check_request("1GB" if budget == AUTO else budget, **search)
    request = _Request(budget, search, timeout)

    def planned() -> str:
        plain = _unwrapped(model)
        require_alone(plain)
        held = _held(plain, optimizer)
        with ExitStack() as stack:
            stack.enter_context(preserved_generators(batch))
            stack.enter_context(set_aside(plain))
            workload = instance_workload(
                in_training_mode(plain),
                batch,
                loss,
                optimizer,
                batch_size=search.get("batch_size"),
                autocast=autocast,
                accumulation=accumulation,
            )
            stack.enter_context(seeded(workload.seed, workload.device))
            if isinstance(workload.batch, GivenBatches):
                stack.callback(workload.batch.close)
            measured = _Measured(workload, plain, Run(Path(run), force=True), request, fast, held)
            return measured.identified(loss, optimizer).plan().policy.dumps()

    policy = Policy.parse(text_of_rank_zero(planned), source=_WRITER)
    if policy.rules:
        warn_of(optimizer)
        convert(model, policy)
    else:
        revert(model)
    conversion = conversion_of(model)
    if accumulation == 1 and conversion is not None:
        conversion.watched = _WATCHED


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile: one process runs it alone."""
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else model


@dataclass(frozen=True)
class _Request:
    """A budget as the user wrote it, and options of `search_policy`."""

    budget: int | str | None
    search: Mapping[str, Any]
    timeout: float | None
    begin: float = field(default_factory=time.monotonic)
    status: StatusLine = field(default_factory=StatusLine)
    _silent = ("progress", "storage", "sharing", "measure")

    @property
    def identity(self) -> str:
        """Digest, equal for equal requests."""
        apart = (*self._silent, "pins", "forbid", "only")
        asked = {key: value for key, value in self.search.items() if key not in apart}
        restrictions = Restrictions.of(self.search.get("forbid"), self.search.get("only"))
        pins = {glob: settings.to_dict() for glob, settings in self.pins.items()}
        return digest(str(self.budget), asked, restrictions.to_dict(), pins)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the time is up, at least one; None without a timeout."""
        return None if self.timeout is None else max(1.0, self.begin + self.timeout - time.monotonic())

    @property
    def pins(self) -> Pins:
        return self.search.get("pins") or {}

    def progress(self, text: str) -> None:
        """Show what is done at the moment."""
        (self.search.get("progress") or self.status.show)(text)


@dataclass(frozen=True)
class _Measured:
    """A model that is profiled and planned for, once per folder. `held`: bytes that its training has."""

    workload: Workload
    model: nn.Module
    run: Run
    request: _Request
    fast: bool
    held: int

    def identified(self, loss: Any, optimizer: Any) -> _Measured:
        """Return the same with the fingerprint of everything that is measured."""
        workload = self.workload
        versions = [torch.__version__, self.fast, self.request.timeout]
        device = torch.cuda.get_device_name(workload.device) if workload.device.startswith("cuda") else None
        described = {**workload.description, "versions": versions, "name": device}
        parts = [self.model, workload.make_batch(), loss, _options(optimizer), described]
        return replace(self, workload=replace(workload, fingerprint=fingerprint(*parts)))

    def plan(self) -> Plan:
        """Return the plan of an earlier call, or make and write one."""
        source = digest(_WRITER, self.workload.fingerprint)
        origin = _origin(digest(source, self.request.identity))
        for path in (self.run.profile, self.run.plan, self.run.policy):
            _require_ours(self.run, path)
        budget = self._budget()
        plan = self._earlier_plan(origin, budget)
        if plan is None:
            plan = self._searched(self._profile(_origin(source), budget), budget).at(self.run.policy)
            self.run.write(self.run.policy, plan.policy.dumps(), origin)
            self.run.write(self.run.plan, dump_json(plan.to_dict()), origin)
        say(plan.summary)
        return plan

    def _earlier_plan(self, origin: Origin, budget: int | str | None) -> Plan | None:
        """Return the plan in the folder if it is of `origin`; with the budget `auto`, if it still fits."""
        noted = self.run.origin(self.run.plan)
        if noted is None or noted.inputs != origin.inputs:
            return None
        plan = Plan.load(self.run.plan)
        fits = self.request.budget != AUTO or plan.predicted.peak_bytes <= int(budget or 0)
        return plan if fits else None

    def _budget(self) -> int | str | None:
        """Return the budget; for `auto`, what is free and what the training has already."""
        if self.request.budget != AUTO:
            return self.request.budget
        return int((free_memory(self.workload.device)[0] + self.held) * (1 - MARGIN))

    def _profile(self, origin: Origin, budget: int | str | None) -> Profile:
        """Return the profile in the folder, or measure it: its bytes alone if the plain step fits."""
        noted = self.run.origin(self.run.profile)
        if noted is not None and noted.inputs == origin.inputs:
            earlier = Profile.load(self.run.profile)
            if not earlier.partial:
                return earlier
        search = self._options()
        options, seeds = (fast_grid(), 1) if self.fast else (full_grid(), BATCHES)
        faster = "" if self.fast else "; fast=True measures 6 on one, timeout= takes so many seconds"
        say(
            f"profiling at batch size {self.workload.batch_size} on {self.workload.device}: minutes, for"
            f" {len(options)} settings of each layer on {counted(seeds, 'batch')}{faster}"
        )
        announce = announcing(say, seeds, len(options))

        def enough(traced: Profile) -> bool:
            if not search.get("max_batch") and plain_fits(traced, budget, **search):
                return True
            announce(traced.step_ms or 0.0)
            say(_unmeasured(traced))
            return False

        try:
            measured = profile(
                self.workload,
                options=options,
                seeds=seeds,
                path=self.run.profile,
                timeout=self.request.seconds_left,
                enough=enough,
                progress=lambda text, share: self.request.progress(f"{share:4.0%} {text}"),
                save=lambda each: self.run.write(
                    self.run.profile, dump_json(self._noted(each).to_dict()), origin
                ),
            )
        except KeyboardInterrupt:
            self.request.progress("")
            say(f"stopped: the same call goes on from what {self.run.profile} has")
            raise
        finally:
            self.request.progress("")
        measured = self._noted(measured)
        for note in () if measured.partial else measured.notes:
            say(f"note: {note}")
        return measured

    def _noted(self, measured: Profile) -> Profile:
        """Return the profile with notes on the batches that there were."""
        batch = self.workload.batch
        notes = batch.notes if isinstance(batch, GivenBatches) else ()
        return replace(measured, notes=(*measured.notes, *notes))

    def _options(self) -> dict[str, Any]:
        """Return the options of the search, for the batches that the training has."""
        search = dict(self.request.search)
        if not search.get("max_batch"):
            search.setdefault("batch_size", self.workload.batch_size)
        return search

    def _searched(self, measured: Profile, budget: int | str | None) -> Plan:
        search = self._options()
        search["pins"] = {**_pins_of_loss(measured, self.request.pins), **self.request.pins}
        search |= {"progress": self.request.progress, "timeout": self.request.seconds_left}
        try:
            return search_policy(measured, budget, workload=self.workload, **search)
        finally:
            self.request.progress("")


def _unmeasured(traced: Profile) -> str:
    """Return what takes no measuring: the peak under 4 bits everywhere."""
    four = traced.predict(Policy.uniform(level=16)).peak_bytes
    return (
        f"without measuring: mt.Policy.uniform(level=16), 4 bits everywhere, has a peak of"
        f" {format_bytes(four)}, not {format_bytes(traced.peak_bytes)}"
    )


def _held(model: nn.Module, optimizer: Any) -> int:
    """Return the bytes of weights, buffers, gradients and optimizer state that there are."""
    state = tensors_in(unwrapped(optimizer).state) if isinstance(optimizer, Optimizer) else []
    return bytes_of([*model.parameters(), *model.buffers(), *gradients_of(model), *state])


def _options(optimizer: Any) -> Any:
    """Return what the bytes and the time of an optimizer's step depend on."""
    if not isinstance(optimizer, Optimizer):
        return optimizer
    inner = unwrapped(optimizer)
    groups = [
        [{name: str(value) for name, value in group.items() if name not in _RATES}, group["params"]]
        for group in inner.param_groups
    ]
    return [type(inner), groups]


def _origin(inputs: str) -> Origin:
    return Origin(inputs, {MADE_BY: _WRITER})


def _require_ours(run: Run, path: Path) -> None:
    """Raise RunError for a file that a command or the user has written."""
    noted = run.origin(path)
    if not path.exists() or (noted is not None and noted.about.get(MADE_BY) == _WRITER):
        return
    if noted is None:
        raise RunError(
            f"{path}: mt.auto did not write it, or it was edited since\n"
            "name another folder with run=, or load an edited policy with mt.Policy.load"
        )
    trained = f', or train with what is there:\nmt.convert(model, mt.Policy.load("{run.policy}"))'
    raise RunError(
        f"{path}: was written by a command of mesa-tune, not by mt.auto\n"
        f'give mt.auto a folder of its own, run="{run.folder}-auto"{trained if run.policy.exists() else ""}'
    )


def _pins_of_loss(measured: Profile, pins: Pins) -> Pins:
    """Return pins that leave the layers outside the model exact, without those that `pins` matches."""
    names = [layer.name for layer in measured.layers if layer.name.startswith("loss.")]
    return {name: EXACT for name in names if not any(fnmatchcase(name, glob) for glob in pins)}
