"""Is training under a policy within a noise ratio as good as plain training? Several seeds, paired.

    python benchmarks/learning.py [--tasks digits,text,resnet,lora] [--seeds 5] [--policies plain,fastest]
        [--ratios 0.1,0.3] [--untrained smallest]
    python benchmarks/learning.py --docs    # writes docs/learning.md from results/learning.jsonl

Plain, two policies of the search: the fastest within 40 % of the plain peak, and the smallest (`--smallest`),
both within the default noise ratio, and rivals (`learning_policies.py`). `--ratios` adds smallest policies
within others. A seed determines initialization and batches, equally for all policies, so differences to plain
are paired.

What is hard: noise ratios grow during training. So policies are solved from a profile with the weights at the
end of a plain training with another seed, and each training ends with a measurement of its policy's ratio.
`--untrained` adds policies from a profile of the untrained model, as a user has it at first; of `lora`, that
is the trained model which its adapters adapt.

Each policy is a line of `results/learning.jsonl`, and so is each training. The same command trains only what
has no line of the same code. More `--seeds` make the intervals narrower.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from common import RESULTS, ROOT, append, code_of, json_lines
from learning_lora import LORA
from learning_page import table, write
from learning_policies import FASTEST, PLAIN, RATIO, RIVALS, SMALLEST, UNTRAINED, policy_of, slowdown
from learning_resnet import RESNET
from learning_tasks import TASKS, Task, train
from torch import nn

import mesa_tune as mt
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.measure.errors.unseen import BATCHES, UNUSED_DRAWS

FOLDERS = (
    "ops",
    "policy",
    "codecs",
    "engine",
    "formulas",
    "conversion",
    "workload",
    "profiles",
    "measure",
    "search",
)
ALL = {**TASKS, "resnet": RESNET, "lora": LORA}
SOURCES = {"resnet": ("learning_resnet.py",), "lora": ("learning_lora.py",)}
"""Files of tasks, besides that of all."""

WITHOUT = {"lora": "the model before it"}
"""What has the score `uninformed`, if not a guess that ignores the input."""

PROFILED_SEED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default=",".join(ALL))
    parser.add_argument("--seeds", type=int, default=5, help="trainings under each policy (at least 2)")
    every = ",".join([PLAIN, FASTEST, SMALLEST, *RIVALS])
    parser.add_argument("--policies", default=every, help=f"of {every}")
    parser.add_argument("--ratios", default="", help="noise ratios of further smallest policies")
    parser.add_argument("--untrained", default="", help="policies also found for the untrained model")
    parser.add_argument("--docs", action="store_true", help="write docs/learning.md from the results")
    arguments = parser.parse_args()
    if arguments.docs:
        path = write(lines(), json_lines(RESULTS / "early_plans.jsonl"))
        print(f"wrote {path}")
        return
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2: one training has no spread")
    names, untrained = (
        [name for name in every.split(",") if name in option.split(",")]
        for option in (arguments.policies, arguments.untrained)
    )
    names += [f"{SMALLEST}{RATIO}{ratio}" for ratio in arguments.ratios.split(",") if ratio]
    names += [f"{name}{UNTRAINED}" for name in untrained]
    for task in arguments.tasks.split(","):
        measure(task, names, range(arguments.seeds))


def measure(name: str, names: Iterable[str], seeds: Iterable[int]) -> None:
    """Search for the policies of task `name` that have no line, train what has none, and print the table."""
    task, version = ALL[name], code(name)
    for label in names:
        if not recorded(name, version, label):
            append("learning", {"task": name, "code": version, **policy_line(name, label)})
    for seed in seeds:
        for label in names:
            if not recorded(name, version, label, seed):
                row = {"policy": label, "seed": seed, **trained(task, recorded(name, version, label), seed)}
                append("learning", {"task": name, "code": version, **row})
                print(f"{name}, {label}, seed {seed}: {task.metric} {row['score']:.4f}", flush=True)
    print("\n".join(table(lines(), name)))


def lines() -> list[dict[str, Any]]:
    """Return all results, oldest first."""
    return json_lines(RESULTS / "learning.jsonl")


def recorded(task: str, version: str, label: str, seed: int | None = None) -> dict[str, Any] | None:
    """Return the line of a policy, or that of its training with `seed`, if code `version` made one."""
    wanted = {"task": task, "code": version, "policy": label, "seed": seed}
    found = (line for line in lines() if all(line[key] == value for key, value in wanted.items()))
    return next(found, None)


def code(task: str) -> str:
    """Return a hash of the sources that policies and trainings of a task depend on."""
    own = (ROOT / "benchmarks" / name for name in ("learning_tasks.py", *SOURCES.get(task, ())))
    return code_of(FOLDERS, *own, ROOT / "examples" / "digits_vit.py")


def policy_line(name: str, label: str) -> dict[str, Any]:
    """Return policy `label`, its predicted bytes and noise ratio, and the ratio with the first weights."""
    print(f"{name}: searching {label}", flush=True)
    task, profile = ALL[name], profile_of(name, trained=UNTRAINED not in label)
    budget, policy = policy_of(profile, label.removesuffix(UNTRAINED))
    predicted = profile.predict(policy or mt.Policy.parse(""))
    plain = {"plain_peak": profile.peak_bytes, "uninformed": task.uninformed(), "steps": task.steps}
    values = {name: getattr(task, name) for name in ("title", "metric", "relative")}
    line = {"policy": label, "seed": None, **values, **plain, "budget": budget, "without": WITHOUT.get(name)}
    line |= {"peak": predicted.peak_bytes, "saved": predicted.saved_bytes}
    line["step"] = slowdown(profile, predicted)
    if policy is None:
        return {**line, "text": None}
    ratios = {
        "predicted": predicted.gradient_noise_ratio,
        "at_start": mt.verify(task.workload, policy, steps=1).gradient_noise_ratio,
    }
    return {**line, **ratios, "text": policy.dumps()}


@cache
def profile_of(name: str, *, trained: bool) -> mt.Profile:
    """Return the profile of a task, with the weights after training or those before it."""
    task = ALL[name]
    if not trained:
        return mt.profile(task.workload)
    return mt.profile(with_weights(task.workload, train(task, None, PROFILED_SEED).model))


def with_weights(workload: mt.Workload, trained: nn.Module) -> mt.Workload:
    """Return the workload with models that have the weights of `trained`."""
    weights = trained.state_dict()

    def model() -> nn.Module:
        built = workload.model()
        built.load_state_dict(weights)
        return built

    return replace(workload, model=model)


def trained(task: Task, line: dict[str, Any] | None, seed: int) -> dict[str, Any]:
    """Return the score of one training, and the noise ratio of the policy in `line` with the last weights."""
    assert line is not None
    policy = None if line["text"] is None else mt.Policy.parse(line["text"])
    model, drawn = train(task, policy, seed)
    score = task.score(model)
    ratio = None if policy is None else noise_ratio(task.workload, model.train(), policy)
    return {"score": score, "drawn": drawn, "at_end": ratio}


def noise_ratio(workload: mt.Workload, model: nn.Module, policy: mt.Policy) -> float | None:
    """Return the noise ratio of `policy` with the weights of `model`, on batches of their own."""
    joint = JointError(workload, model)
    squares = [joint.squares(policy, draw, 0) for draw in range(UNUSED_DRAWS, UNUSED_DRAWS + BATCHES)]
    return joint.noise(first=UNUSED_DRAWS).own.ratio(np.mean(squares, axis=0))


if __name__ == "__main__":
    main()
