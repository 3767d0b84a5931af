"""Does a plan that was solved before training keep its promise to the end? Several seeds, paired.

    python benchmarks/early_plans.py [--tasks digits,text,resnet,lora,llama,denoiser] [--seeds 10]
        [--ratios 0.03,0.005] [--read]

Each task is profiled before its first step, as a user does. Plans of the search: for 40 % of the plain peak,
or the least multiple of 5 % within reach, and the smallest (`--smallest`), within the default noise ratio and
within each of `--ratios`. Control: uniform 2 bits. A seed determines initialization and batches, equally for
all policies, so differences to plain are paired. With the first seed, `own_ratio.py`, which shares no code
with the profile, measures the noise ratio at every tenth of the training: of the plan and of uniform 4 bits,
with the same weights. `--read`: also trains under the plan for 40 % with `mt.Monitor(remedy="plan")`, which
reads the ratio in the training and solves the plan again. `learning.py --docs` writes the page.
Results are lines of `results/early_plans.jsonl`; the same command trains only what has no line of this code.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from common import RESULTS, ROOT, append, code_of, json_lines
from learning import FOLDERS
from learning_lora import LORA
from learning_new import NEW
from learning_policies import FASTEST, PLAIN, RATIO, SMALLEST, TWO_BITS, policy_of, slowdown
from learning_resnet import RESNET
from learning_tasks import TASKS, Task, train
from own_ratio import OwnRatio
from torch import Tensor, nn

import mesa_tune as mt

ALL = {**TASKS, "resnet": RESNET, "lora": LORA, **NEW}
POLICIES = (PLAIN, FASTEST, SMALLEST, TWO_BITS)
READ = "read again"
BATCHES, ERRORS = 24, 6
FOUR_BITS = mt.Policy.uniform(level=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default=",".join(ALL))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ratios", default="", help="noise ratios of further smallest plans")
    parser.add_argument("--read", action="store_true", help="train with readings, too")
    arguments = parser.parse_args()
    labels = [*POLICIES, *(f"{SMALLEST}{RATIO}{ratio}" for ratio in arguments.ratios.split(",") if ratio)]
    labels += [READ] * arguments.read
    for name in arguments.tasks.split(","):
        missing = [label for label in labels if found(name, label) is None]
        if missing:
            search(name, missing)
        for seed in range(arguments.seeds):
            for label in labels:
                if found(name, label, seed) is None:
                    run(name, label, seed)


def found(name: str, label: str, seed: int | None = None) -> dict[str, Any] | None:
    """Return the line of a policy, or of its training with `seed`, if this code made one."""
    wanted = {"task": name, "policy": label, "seed": seed, "code": code()}
    lines = json_lines(RESULTS / "early_plans.jsonl")
    return next((line for line in lines if all(line[key] == value for key, value in wanted.items())), None)


@cache
def code() -> str:
    """Return a hash of the sources that plans and trainings depend on."""
    files = ("learning_tasks.py", "learning_lora.py", "learning_resnet.py", "learning_new.py")
    return code_of(
        FOLDERS, *(ROOT / "benchmarks" / file for file in files), ROOT / "examples" / "digits_vit.py"
    )


def search(name: str, labels: list[str]) -> None:
    """Profile a task before its training, and append a line for each policy."""
    task = ALL[name]
    print(f"{name}: profiling", flush=True)
    profile = profile_of(name)
    for label in labels:
        budget, policy = policy_of(profile, FASTEST if label == READ else label)
        predicted = profile.predict(policy or mt.Policy.parse(""))
        line = {"task": name, "code": code(), "policy": label, "seed": None, "budget": budget}
        line |= {key: getattr(task, key) for key in ("title", "metric", "relative", "steps")}
        line |= {"peak": predicted.peak_bytes / profile.peak_bytes, "step": slowdown(profile, predicted)}
        line |= {"predicted": predicted.gradient_noise_ratio, "worst": predicted.worst_own_ratio}
        append("early_plans", {**line, "text": None if policy is None else policy.dumps()})


def profile_of(name: str) -> mt.Profile:
    """Return the profile of a task, from `build/early_plans` if this code made one."""
    path = ROOT / "build" / "early_plans" / f"{name}-{code()}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        mt.profile(ALL[name].workload).save(path)
    return mt.Profile.load(path)


def run(name: str, label: str, seed: int) -> None:
    """Train once, and append a line."""
    task, line = ALL[name], found(name, label)
    assert line is not None
    policy = None if line["text"] is None else mt.Policy.parse(line["text"])
    growth: list[tuple[float, ...]] = []
    if label == READ:
        model, drawn = train(task, policy, seed, monitored(name, line["budget"]))
    elif seed == 0 and policy is not None and label != TWO_BITS:
        model, drawn = train(task, policy, seed, partial(read, growth, task, policy))
    else:
        model, drawn = train(task, policy, seed)
    score = task.score(model)
    row = {"task": name, "code": code(), "policy": label, "seed": seed, "score": score, "drawn": drawn}
    append("early_plans", {**row, "growth": growth})
    print(f"{name}, {label}, seed {seed}: {task.metric} {score:.4f} {growth[-1:]}", flush=True)


def monitored(name: str, budget: str) -> Callable[[int, nn.Module], None]:
    """Return what reads the ratio of the plan for a budget, on batches of its own, and solves it again."""
    profile, task, monitors = profile_of(name), ALL[name], list[mt.Monitor]()
    folder = ROOT / "build" / "early_plans" / f"{name}-run"
    plan = mt.search_policy(profile, budget, trials=0)
    profile.save(folder / "profile.json")
    plan.save(folder / "plan.json")

    def watch(step: int, model: nn.Module) -> None:
        if not step:
            loss = task.workload.loss
            assert loss is not None
            monitors.append(mt.Monitor(model, loss, remedy="plan", run=folder))
            return
        with torch.random.fork_rng():
            monitors[-1].step(task.workload.batch(task.workload.batch_size))

    return watch


def read(growth: list[tuple[float, ...]], task: Task, policy: mt.Policy, step: int, model: nn.Module) -> None:
    """Append (share of the steps, own and worst ratio of the policy, and both of uniform 4 bits)."""
    if step % (task.steps // 10):
        return
    state = torch.get_rng_state()
    plain = mt.revert(copy.deepcopy(model))
    torch.manual_seed(7919 * step + 1)
    batches = [task.workload.batch(task.workload.batch_size) for _ in range(BATCHES)]
    meter = OwnRatio(plain)
    exact = [gradient(task, plain, batch, seed) for seed, batch in enumerate(batches)]
    for each in exact:
        meter.add(each)
    ratios: list[float] = []
    for each_policy in (policy, FOUR_BITS):
        converted = mt.convert(copy.deepcopy(plain), each_policy, seed=step)
        gradient(task, converted, batches[0], 0, each_policy)  # the first step may store otherwise
        squares = [
            meter.parts(
                [
                    a - b
                    for a, b in zip(gradient(task, converted, batch, seed, each_policy), right, strict=True)
                ]
            )
            for seed, (batch, right) in enumerate(zip(batches[:ERRORS], exact, strict=False))
        ]
        errors = torch.stack(squares).mean(0)
        ratios += [meter.ratio(errors), meter.worst(errors)]
    growth.append((step / task.steps, *ratios))
    torch.set_rng_state(state)


def gradient(
    task: Task, model: nn.Module, batch: Any, seed: int, policy: mt.Policy | None = None
) -> list[Tensor]:
    """Return the gradient of the trained parameters."""
    assert task.workload.loss is not None
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with mt.compress_saved(policy or mt.Policy.parse(""), seed=seed):
        value = task.workload.loss(model, batch)
    value.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in trained]


if __name__ == "__main__":
    sys.exit(main())
