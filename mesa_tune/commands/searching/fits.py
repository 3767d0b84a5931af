"""Which batch sizes and lengths of samples fit into a limit: plain, under uniform policies, under a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mesa_tune.commands.common import Output
from mesa_tune.errors import BudgetError, MesaTuneError, WorkloadError
from mesa_tune.units import format_bytes, format_table, wrapped

if TYPE_CHECKING:
    from mesa_tune.policy import Policy
    from mesa_tune.profiles.profile import Profile
    from mesa_tune.search import Plan
    from mesa_tune.workload.workload import Workload


class Fit(NamedTuple):
    """Whether the step under the policy called `name` fits into a limit, and up to which sizes.

    `largest_length`: at the batch size; None for samples without length.
    """

    name: str
    needed_bytes: int
    fits: bool
    largest_batch: int
    largest_length: int | None = None


def fitting(
    workload: Workload,
    profiled: Profile,
    device: str,
    limit: str,
    output: Output,
    more: Mapping[str, Policy] | None = None,
) -> list[Fit]:
    """Return what fits into `limit` on the device, policy by policy; `more`: further ones, by name."""
    from torch.utils.checkpoint import CheckpointError

    from mesa_tune.estimation import blocks_of, estimate
    from mesa_tune.measure.rerun_modules.blocks import rerunning, whole
    from mesa_tune.notice import unnoticed
    from mesa_tune.profiles.tiled_step import SLICES, tiling

    policies = shown_policies()
    losses = [layer.name for layer in profiled.layers if layer.tag == "loss"]
    policies[SLICED] = tiling(policies["at 4 bits"], losses, SLICES)
    plain = estimate(workload, device=device)
    if blocks := blocks_of(plain):
        policies[AGAIN] = rerunning(policies[SLICED], whole(blocks))
    policies |= more or {}
    found: dict[str, Fit] = {}
    for name, policy in policies.items():
        output.status(f"{name}: which batch sizes fit into {limit}")
        try:
            with unnoticed():  # a loss that cannot have slices has no row
                fit = estimate(workload, policy, device=device) if policy.rules else plain
                length = None if workload.length is None else fit.largest_length(limit)
                row = Fit(name, fit.needed_bytes, fit.fits(limit), fit.largest_batch(limit), length)
        except (MesaTuneError, CheckpointError):  # such as a block that changes its input in place
            if name not in _SETTINGS:
                raise
            continue
        if name not in _SETTINGS or row[1:] not in [known[1:] for known in found.values()]:
            found[name] = row
    return list(found.values())


def fits_table(fits: Sequence[Fit], device: str, limit: str | None) -> list[str]:
    rows = [
        [
            fit.name,
            format_bytes(fit.needed_bytes),
            "yes" if fit.fits else "no",
            str(fit.largest_batch),
            *([] if fit.largest_length is None else [str(fit.largest_length)]),
        ]
        for fit in fits
    ]
    if not rows:
        return []
    header = [f"on {device}", "needs", f"fits {limit}", "largest batch", "longest"][: len(rows[0])]
    return ["", *format_table(header, rows), *_explained([fit.name for fit in fits], device, limit or "")]


SLICED, AGAIN = "at 4 bits, loss in slices", "…, blocks that run again"
_SETTINGS = {SLICED: "`tile: 8` in `on loss:`", AGAIN: "`store: recompute` in `on module:`"}


def _explained(names: Sequence[str], device: str, limit: str) -> list[str]:
    """Return what the rows mean and how they are had, in lines of at most 80 characters."""
    from mesa_tune.free_memory import room_text

    had = [f"{name.split(', ')[-1]}: {how}" for name, how in _SETTINGS.items() if name in names]
    texts = [f"needs: with {room_text(device)}", "; ".join(had)]
    if device.startswith("cuda") and limit.lower().endswith("gb"):
        texts.append("cards are sold by GiB, which are 7 % more: a card of 24 GB has 24GiB")
    return [line for text in texts if text for line in wrapped(text, 2)]


def shown_policies() -> dict[str, Policy]:
    """Return the policies whose bytes are shown, by name."""
    from mesa_tune.policy import Policy

    return {
        "plain": Policy(()),
        **{f"at {bits} bits": Policy.uniform(level=2**bits) for bits in (8, 4)},
    }


def length_limit(max_length: bool, budget: str | None, trials: int | None) -> tuple[str | None, str | None]:
    """Return the memory in which samples are to be as long as can be, and the budget of the search.

    Of `--max-length` the plan is the smallest, without a budget. Raise BudgetError for what it lacks.
    """
    if not max_length:
        return None, budget
    from mesa_tune.estimation import parse_limit

    if budget is None or trials == 0:
        raise BudgetError(
            "max-length: needs the memory, and the model\n"
            "write it like --max-length --budget 24GB, without --trials 0"
        )
    parse_limit(budget)
    return budget, None


def require_length(limit: str | None, workload: Workload | None) -> None:
    """Raise WorkloadError for a workload whose samples have no length, where one is wanted."""
    if limit is not None and workload is not None and workload.length is None:
        raise WorkloadError(
            f"{workload.path}: max-length: the samples have no length\n"
            "write LENGTH = 2048 into the model file, and batch(batch_size, length)"
        )


def show_lengths(
    workload: Workload | None, profile: Profile, plan: Plan, limit: str | None, output: Output
) -> None:
    """Print the table of what fits into `limit`, under `plan`, too; its last column has lengths."""
    if limit is None or workload is None:
        return
    try:
        fits = fitting(workload, profile, profile.device, limit, output, {"this plan": plan.policy})
    finally:
        output.status("")
    for line in fits_table(fits, profile.device, limit)[1:]:
        output.line(line)
    output.line("")
