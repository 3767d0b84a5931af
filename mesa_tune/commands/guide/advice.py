"""Advice on a profile: which budgets are reachable, what else lowers the peak, and the next command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesa_tune.commands.common import Run, below, format_bytes, wrapped

if TYPE_CHECKING:
    from mesa_tune.profiles.profile import Profile
    from mesa_tune.search.reach import Reach

_DIFFERENCE = 0.02
"""Share of the plain peak by which two peaks must differ to be worth telling apart."""
UNRECORDED = "mesa-tune init, and put this step into model.py"
"""What follows the profile of a script whose step could not be recorded."""


def find_reach(profile: Profile) -> Reach | None:
    """Return which peaks policies reach; None for a profile without prices, from which no policy follows."""
    from mesa_tune.search.reach import reach

    return reach(profile) if has_prices(profile) else None


def has_prices(profile: Profile) -> bool:
    """Return whether errors were measured: not in the step of a script, and not for bytes only."""
    options = (option for layer in profile.layers for option in layer.options)
    return any(not option.settings.exact and bool(option.ratios) for option in options)


def advice(profile: Profile, reach: Reach | None) -> list[str]:
    """Return lines of at most 80 characters: reachable budgets, and what else lowers the peak."""
    from mesa_tune.search.reach import batch_size_of_activations, without_temporaries

    if profile.script is not None:
        return []
    if reach is None:
        smallest, temporaries = batch_size_of_activations(profile), without_temporaries(profile)
        larger = smallest if smallest is None or smallest > profile.batch_size else None
        return [*below(_larger_batch(larger)), *below(_optimizer(temporaries, profile.device))]
    text = _reachable(reach) if reach.is_worth_it else _not_worth_it(profile)
    return [
        *wrapped(text, 18, first="budgets           "),
        *below("" if reach.is_worth_it else _larger_batch(reach.batch_size)),
        *below(_optimizer(reach.without_temporaries, profile.device)),
    ]


def next_command(profile: Profile, reach: Reach | None, run: Run) -> str:
    """Return the command that follows this profile; it succeeds."""
    from mesa_tune.search.reach import LARGE_SHARE

    if reach is None or not (reach.is_worth_it or reach.batch_size):
        return f"mesa-tune report{run.option}"
    budget = f"--budget {reach.budget}"
    if not reach.is_worth_it:
        budget = f"--budget {LARGE_SHARE:.0%} --batch-size {reach.batch_size}"
    # An earlier plan may be for another budget.
    return f"mesa-tune search {budget}{' --force' if run.plan.exists() else ''}{run.option}"


def _reachable(reach: Reach) -> str:
    from mesa_tune.search.objectives import MAX_NOISE_RATIO

    lowest, plain = _share(reach.lowest, reach), format_bytes(reach.plain)
    if reach.quiet is None:
        return f"{lowest} to {plain}, the peak of the plain step, are reachable"
    within = f"within the noise ratio {MAX_NOISE_RATIO:g}"
    text = f"{_share(reach.quiet, reach)} to {plain}, the peak of the plain step, are reachable {within}"
    is_lower = reach.lowest < reach.quiet - _DIFFERENCE * reach.plain
    return f"{text}; with more error, from {lowest}" if is_lower else text


def _share(peak: int, reach: Reach) -> str:
    return f"{format_bytes(peak)} ({peak / reach.plain:.0%})"


def _not_worth_it(profile: Profile) -> str:
    """Return that no policy lowers the peak, and why."""
    from mesa_tune.profiles.prediction import SAVED
    from mesa_tune.search.reach import WORTH

    peak = profile.timeline.at().under({}).peak
    saved = peak.bytes[SAVED] / max(1, sum(peak.bytes.values()))
    why = f"saved tensors are {saved:.0%} of it"
    if peak.phase == "step":
        why = "no activation lives in the optimizer's step"
    elif saved > WORTH:
        why += ", and most stay exact"
    return f"no policy saves {WORTH:.0%} of the peak: {why}"


def _larger_batch(batch_size: int | None) -> str:
    from mesa_tune.search.reach import LARGE_SHARE

    if batch_size is None:
        return ""
    return f"from batch size {batch_size} on, 4 bits everywhere save {1 - LARGE_SHARE:.0%} of it"


def _optimizer(peak: int | None, device: str) -> str:
    """Return what the optimizer's temporaries add to the peak, and how to do without them."""
    if peak is None:
        return ""
    text = f"with `fused=True` the optimizer has no temporaries: {format_bytes(peak)}"
    # On the CPU, optimizers go parameter by parameter as it is.
    return text if device == "cpu" else f"{text}; with `foreach=False` it has those of one parameter"
