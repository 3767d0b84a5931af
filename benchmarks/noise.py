"""Is the predicted noise ratio that of many batches?

    python benchmarks/noise.py [--models vit,gpt,resnet] [--profiles 3] [--sets 5]
    python benchmarks/noise.py --sizes 0.5,1,4 [--sets 3]    # is it the same at other batch sizes?

For each profile, of another seed, and each uniform policy: the ratio that the profile predicts, and that
`mt.verify` measures, beside mean ‖ĝ − g‖² over Σ‖g_b − ḡ‖² / (n − 1), computed here from 64 further batches:
the mean of several sets of 64, and, because 64 batches scatter, too, each of them. This computation shares
no code with mesa-tune but the converted model. Results are appended to `results/noise.jsonl`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from common import append
from intervals import SUBJECTS, workload_of
from own_ratio import OwnRatio
from torch import Tensor

import mesa_tune as mt
from mesa_tune.profiles.entries import fast_grid

FIRST_SEED = 900_000
LEVELS = (16, 4)
BATCHES = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(SUBJECTS))
    parser.add_argument("--profiles", type=int, default=3)
    parser.add_argument("--sets", type=int, default=5)
    parser.add_argument("--sizes", help="batch sizes over the usual one; then only their true ratios")
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        if arguments.sizes:
            at_sizes(name, [float(size) for size in arguments.sizes.split(",")], arguments.sets)
            continue
        sets = {level: [ratio(name, level, number) for number in range(arguments.sets)] for level in LEVELS}
        for seed in range(arguments.profiles):
            work = workload_of(name, seed)
            profile = mt.profile(work, options=fast_grid())
            for level in LEVELS:
                policy = mt.Policy.uniform(level=level)
                found = {
                    "predicted": profile.predict(policy).gradient_noise_ratio,
                    "verified": mt.verify(work, policy, steps=1).gradient_noise_ratio,
                }
                true = statistics.fmean(sets[level])
                row = {"model": name, "level": level, "seed": seed, "true": true, "sets": sets[level]}
                append("noise", {**row, **found, "batches": BATCHES})
                shown = [
                    f"{key} {(value or 0) / true:.2f} ({(value or 0) / max(sets[level]):.2f} to "
                    f"{(value or 0) / min(sets[level]):.2f})"
                    for key, value in found.items()
                ]
                print(
                    f"{name} {level} levels, seed {seed}: {true:.2e}; over it: {', '.join(shown)}", flush=True
                )


def at_sizes(name: str, sizes: Sequence[float], sets: int) -> None:
    """Measure the true ratio at other batch sizes: the errors of samples and their noise both average out."""
    for level in LEVELS:
        for size in sizes:
            found = [ratio(name, level, number, size) for number in range(sets)]
            append("noise", {"model": name, "level": level, "size": size, "sets": found, "batches": BATCHES})
            each = ", ".join(f"{value:.2e}" for value in found)
            print(f"{name} {level} levels, {size:g} times its batch: {each}", flush=True)


def ratio(name: str, level: int, number: int, size: float = 1) -> float:
    """Return the noise ratio of uniform `level`, by `OwnRatio`, of one set of batches.

    `size`: of the batch, over the usual one.
    """
    work, policy = workload_of(name, 0), mt.Policy.uniform(level=level)
    plain, packed = work.model(), mt.convert(work.model(), policy, seed=FIRST_SEED)
    noise, errors = OwnRatio(plain), torch.zeros(())
    for draw in range(number * BATCHES, (number + 1) * BATCHES):
        torch.manual_seed(FIRST_SEED + draw)
        batch = work.batch(round(size * work.batch_size))
        exact = gradient(work, plain, batch, draw)
        noise.add(exact)
        with mt.compress_saved(policy, seed=draw):
            changed = gradient(work, packed, batch, draw)
        pairs = zip(changed, exact, strict=True)
        errors = errors + noise.parts([after - before for after, before in pairs]) / BATCHES
    return noise.ratio(errors)


def gradient(work: mt.Workload, model: Any, batch: Any, number: int) -> list[Tensor]:
    """Return the gradient of each parameter on `batch`."""
    model.zero_grad()
    torch.manual_seed(number)
    assert work.loss is not None
    work.loss(model, batch).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


if __name__ == "__main__":
    main()
