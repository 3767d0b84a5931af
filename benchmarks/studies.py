"""What does the study win over the exact solver's plan, from one seed to another?

    python benchmarks/studies.py [--models digits_vit,llama] [--seeds 5] [--timeout 60] [--trials 100]

Models, limits and the noise ratio asked for are those of `search.py`. At each limit the solved plan
(`trials=0`) and, for each seed, that of a study; a study's plan differs from the solved one only if it was
better in fresh measurements by more than two standard errors. Then steps of the solved plan and of those that
won are timed in turn once more. Results are lines of `results/studies.jsonl`.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from common import append, ratios
from search_models import ASKED, Method, Model, Running, limits, times_in_turn

import mesa_tune as mt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default="digits_vit,llama")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=60, help="seconds per study")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        model = Model(name)
        for cell, limit in itertools.chain(limits(model).items(), [("smallest", None)]):
            result = studied(model, limit, arguments)
            append("studies", {"model": name, "cell": cell, "limit": limit, **result})
            print(f"{name}, {cell}: the solved plan's gap is {result['gap']:.2%}")
            for line in result["studies"]:
                print(
                    f"  {line['won']}; step over solved {line['step']}, peak {line['peak']:.3f}", flush=True
                )


def studied(model: Model, limit: int | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the solved plan's proven gap, and what each study won over it."""
    objective = "time" if limit is not None else "memory"

    def plan(seed: int, trials: int) -> mt.Plan:
        return mt.search_policy(
            model.profile,
            limit,
            workload=model.workload,
            objective=objective,
            max_noise_ratio=ASKED,
            trials=trials,
            timeout=arguments.timeout,
            seed=seed,
        )

    solved = plan(0, 0)
    lines = []
    for seed in range(arguments.seeds):
        found = plan(seed, arguments.trials)
        lines.append(
            {
                "seed": seed,
                "trials": found.trials,
                "won": found.won,
                "step": None if found.policy == solved.policy else beside(model, solved, found, arguments),
                "peak": found.predicted.peak_bytes / solved.predicted.peak_bytes,
                "noise ratio": found.measured and found.measured.noise_ratio,
            }
        )
    return {"objective": objective, "gap": solved.gap, "bound": solved.bound, "studies": lines}


def beside(model: Model, solved: mt.Plan, found: mt.Plan, arguments: argparse.Namespace) -> Any:
    """Return steps of a study's plan over steps of the solved one, taken in turn: median and quartiles."""
    runs = {name: Running(model, Method(plan.policy)) for name, plan in {"a": solved, "b": found}.items()}
    times = times_in_turn(runs, arguments.rounds)
    return ratios(times["a"], times["b"])


if __name__ == "__main__":
    main()
