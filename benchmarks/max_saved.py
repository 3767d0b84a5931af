"""Is there a policy that saves so few bytes, is that fast, and is within the noise?

    python benchmarks/max_saved.py [--models digits_vit,deit_ti] [--batches 12] [--rounds 9] [--smallest]

`--budget 100% --forbid recompute` with `--max-saved 5% --max-slowdown 1.2`, and with 2.5 % and 1.3: the plan
of least error, which is to be within noise ratio 0.1. With and without the codecs below one bit (`rows`,
`levels`). Models are those of `search.py`.
Noise ratios are measured on unseen batches, steps in turn. Last, the plan of `--smallest` with and without
these codecs, predicted. Results are lines of `results/max_saved.jsonl`.
"""

from __future__ import annotations

import argparse
from typing import Any

from common import append, ratios
from search_models import MAX_NOISE_RATIO, Method, Model, Running, noise_ratios, times_in_turn

import mesa_tune as mt
from mesa_tune.errors import BudgetError

ASKED = (("5%", 1.2), ("2.5%", 1.3))
BELOW_ONE_BIT = ("rows", "levels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default="digits_vit,deit_ti")
    parser.add_argument("--batches", type=int, default=12, help="unseen batches for noise ratios")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--smallest", action="store_true", help="only the plans of `--smallest`")
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        model = Model(name)
        for saved, slowdown in () if arguments.smallest else ASKED:
            for forbid in ((), BELOW_ONE_BIT):
                result = found(model, saved, slowdown, forbid, arguments)
                asked = {"model": name, "max_saved": saved, "max_slowdown": slowdown, "forbid": forbid}
                append("max_saved", {**asked, **result})
                print(f"{name}, {saved}, {slowdown}, without {forbid or 'nothing'}: {result}", flush=True)
        for forbid in ((), BELOW_ONE_BIT):
            result = smallest(model, forbid)
            append("max_saved", {"model": name, "smallest": True, "forbid": forbid, **result})
            print(f"{name}, smallest, without {forbid or 'nothing'}: {result}", flush=True)


def smallest(model: Model, forbid: tuple[str, ...]) -> dict[str, Any]:
    """Return what the plan of the lowest peak is predicted to have, and which codecs it uses."""
    plan = mt.search_policy(
        model.profile, objective="memory", max_noise_ratio=MAX_NOISE_RATIO, forbid=forbid, trials=0
    )
    predicted, plain_ms = plan.predicted, model.profile.plain_ms(model.subject.batch_size)
    assert predicted.step_ms is not None
    chosen = model.profile.assignment(plan.policy).values()
    return {
        "peak": predicted.peak_bytes / plan.baseline.peak_bytes,
        "saved": predicted.saved_bytes / plan.baseline.saved_bytes,
        "noise_ratio": predicted.gradient_noise_ratio,
        "step": predicted.step_ms / plain_ms,
        "rows": sum(settings.rows < 1 for settings in chosen),
        "levels": sum(settings.store == "levels" for settings in chosen),
    }


def found(
    model: Model, saved: str, slowdown: float, forbid: tuple[str, ...], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return what the plan of least error within the limits has, predicted and measured."""

    try:
        best = mt.search_policy(
            model.profile,
            "100%",
            objective="error",
            max_saved=saved,
            max_slowdown=slowdown,
            forbid=("recompute", *forbid),
            trials=0,
        )
    except BudgetError as error:
        return {"is_within": False, "why": str(error)}
    predicted = best.predicted
    runs = {"plain": Running(model, Method()), "plan": Running(model, Method(best.policy))}
    ratio = noise_ratios(model, runs, arguments.batches)["plan"]
    times = times_in_turn(runs, arguments.rounds)
    assert predicted.step_ms is not None
    return {
        "is_within": ratio <= MAX_NOISE_RATIO,
        "saved": predicted.saved_bytes / best.baseline.saved_bytes,
        "noise_ratio": predicted.gradient_noise_ratio,
        "noise_ratio_measured": ratio,
        "step": predicted.step_ms / model.profile.plain_ms(model.subject.batch_size),
        "step_measured": ratios(times["plain"], times["plan"]),
    }


if __name__ == "__main__":
    main()
