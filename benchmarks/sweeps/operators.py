"""Every operator and module of PyTorch that has a gradient: plain beside converted, small tensors included.

Each is run with its sample inputs (`sampled`), with the rows of those scaled from 1e-3 to 1e3 (`scaled`),
with some elements at -Inf (`masked`), and with its largest sample under `torch.compile` (`compiled`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.sweeps.checks import FaultError, Reference, UnfitError, check
from benchmarks.sweeps.databases import MOST, as_sampled, elements, masked, names, programs, scaled
from benchmarks.sweeps.runner import BROKEN, ILL_POSED, RIGHT, SKIPPED, Case, Outcome, Sweep
from benchmarks.sweeps.steps import FAILURES, Program, bytes_saved, step
from mesa_tune.conversion.model import conversion_of

LEVELS = (256, 16)
CHANGES: dict[str, Callable[[Program], list[Program]]] = {
    "sampled": as_sampled,
    "scaled": scaled,
    "masked": masked,
}
COMPILED = "compiled"
ENOUGH = 3
"""Broken samples of a case after which the others are not run: the control of each takes time."""
VARIANTS = (*CHANGES, COMPILED)

DECOMPOSED = "decomposition of a tiny or singular matrix"
PEAKED = "rows of one large probability, whose own gradient nearly vanishes"
SATURATED = "gates and scores of inputs up to 1e3: derivatives near 0, rounded, meet large inputs"
VANISHING = "rows of one element, whose gradient is 0 but for float32's rounding"
ILL = {
    **{(name, "sampled"): DECOMPOSED for name in ("pca_lowrank",)},
    **{(name, "scaled"): DECOMPOSED for name in ("pca_lowrank", "svd_lowrank", "linalg.pinv.singular")},
    **{(name, "sampled"): PEAKED for name in ("masked.softmin", "nn.Softmax")},
    **{(f"nn.{name}", "scaled"): SATURATED for name in ("RNN", "GRU", "LSTM", "MultiheadAttention")},
    **{(f"nn.Transformer{part}", "scaled"): SATURATED for part in ("", "Encoder", "EncoderLayer")},
    ("nn.TransformerDecoderLayer", "scaled"): SATURATED,
    ("nn.functional.normalize", "masked"): VANISHING,
    **{(name, "masked"): PEAKED for name in ("masked.softmax", "masked.softmin", "nn.Softmax")},
}
"""Cases whose gradient has a large error that the case brings along, not how it is stored, and why."""

CRASHING = {(name, "masked") for name in ("nn.functional.grid_sample", "grid_sampler_2d")}
"""Cases in which PyTorch itself reads what is not there: a coordinate of -Inf."""


@dataclass
class Account:
    """What the samples of one case gave."""

    tried: int = 0
    unfit: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    errors: dict[int, float] = field(default_factory=dict)
    plain_bytes: int = 0
    bytes: int = 0
    tags: set[str] = field(default_factory=set)

    def outcome(self) -> Outcome:
        """The outcome of the case: broken where one sample is."""
        errors = {f"error_{level}": error for level, error in self.errors.items()}
        figures: dict[str, Any] = {"samples": self.tried, "faults": self.faults.total(), **errors}
        if self.plain_bytes:
            figures |= {"plain_bytes": self.plain_bytes, "bytes": self.bytes}
        if self.tags:
            figures["tags"] = sorted(self.tags)
        if self.faults:
            return Outcome(BROKEN, next(iter(self.faults)), figures)
        if not self.tried:
            return Outcome(SKIPPED, self.unfit.most_common(1)[0][0] if self.unfit else "no samples", figures)
        return Outcome(RIGHT, "", figures)

    def add(self, program: Program, levels: tuple[int, ...]) -> None:
        """Check `program` at `levels`."""
        try:
            reference = Reference.of(program)
            for level in levels:
                self.errors[level] = max(check(reference, level), self.errors.get(level, 0.0))
        except UnfitError as why:
            self.unfit[str(why)] += 1
            return
        except FaultError as fault:
            self.faults[str(fault)] += 1
        self.tried += 1


def run(case: Case, most: int = MOST) -> Outcome:
    """The outcome of one operator or module in one variant, with up to `most` samples."""
    if case in CRASHING:
        return Outcome(SKIPPED, "plain crashes")
    account = Account()
    if case.variant == COMPILED:
        _compile(case.name, account)
    else:
        for program in _changed(case, most):
            account.add(program, LEVELS)
            if account.faults.total() >= ENOUGH:
                break
    if case.variant == "sampled":
        _weigh(programs(case.name, most), account)
    return _judged(case, account.outcome())


def _judged(case: Case, outcome: Outcome) -> Outcome:
    """`outcome`, or that the case is ill-posed, if nothing but an error of a known cause is wrong."""
    known = outcome.result == BROKEN and outcome.cause.startswith(("error ", "not finite")) and case in ILL
    return replace(outcome, result=ILL_POSED, cause=ILL[case]) if known else outcome


def _changed(case: Case, most: int) -> Iterator[Program]:
    for program in programs(case.name, most):
        yield from CHANGES[case.variant](program)


def _compile(name: str, account: Account) -> None:
    """Check one sample under torch.compile: the largest that has a plain gradient."""
    torch._dynamo.reset()
    for program in sorted(programs(name), key=elements, reverse=True):
        account.add(replace(program, compiled=True), LEVELS[:1])
        if account.tried:
            return


def _weigh(samples: Sequence[Program], account: Account) -> None:
    """Add the bytes that plain and converted save for the samples, and the tags of the layers."""
    for program in samples:
        try:
            plain, ours = program.plain(), program.converted(LEVELS[-1])
            for module in (plain, ours):
                step(program, module)
            account.plain_bytes += bytes_saved(program, plain)
            account.bytes += bytes_saved(program, ours)
        except FAILURES:
            continue
        conversion = conversion_of(ours)
        assert conversion is not None
        account.tags |= {tag for tag, _, _ in conversion.catalog.layers() if tag != "other"}


SWEEP = Sweep(
    "operators", lambda: [Case(name, variant) for variant in VARIANTS for name in names()], run, 120.0
)
