"""How often does a predicted interval cover the gradient error that is measured on unseen batches?

    python benchmarks/intervals.py [--models vit,gpt,resnet] [--profiles 10] [--random 4] [--batches 7]
        [--run FOLDER]
    python benchmarks/intervals.py --summary [--run FOLDER]

Each profile of a small, briefly trained model has another seed, so other batches and other rounding. For each
there are random policies (any option or exact storage for each layer, of at least 1, 2, 3 or 4 bits), and
policies solved for the saved bytes of uniform 4, 3 and 2 bits. The truth is the mean over 16 unseen batches
and 3 rounding seeds. Each profile's results are a file of `--run`; the same command measures those that are
missing, and appends a summary to `results/intervals.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accuracy import load_example
from common import append
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

import mesa_tune as mt
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.measure.profiling import SEEDS as SEEDS_OF_PROFILE
from mesa_tune.policy.settings import EXACT
from mesa_tune.profiles.entries import full_grid
from mesa_tune.profiles.profile import Profile

UNSEEN, BATCHES, SEEDS = 5000, 16, 3
STEPS, LEARNING_RATE = 30, 3e-3
LEVELS = (16, 8, 4)
LENGTH = 64
DIGITS = load_example()
vars(DIGITS).update(WIDTH=32, DEPTH=3)


class Subject(NamedTuple):
    """A model, its batches and its loss."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    batch_size: int


def gpt() -> nn.Module:
    config = GPT2Config(
        vocab_size=128, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    config.update({"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0})
    return GPT2LMHeadModel(config)


@cache
def source_text() -> Tensor:
    """Return the ASCII codes of 40 modules of Python's standard library."""
    modules = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    text = "".join(module.read_text("utf-8", "ignore") for module in modules)
    return torch.tensor([min(ord(character), 127) for character in text])


def text_batch(batch_size: int) -> Tensor:
    text = source_text()
    starts = torch.randint(len(text) - LENGTH - 1, (batch_size,))
    return torch.stack([text[start : start + LENGTH + 1] for start in starts])


def text_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def resnet() -> nn.Module:
    config = ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[8, 16, 32], depths=[1, 1, 1], layer_type="basic"
    )
    config.num_labels = 10
    return ResNetForImageClassification(config)


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images).logits, labels)


SUBJECTS = {
    "vit": Subject(DIGITS.model, DIGITS.batch, DIGITS.loss, 32),
    "gpt": Subject(gpt, text_batch, text_loss, 8),
    "resnet": Subject(resnet, DIGITS.batch, image_loss, 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(SUBJECTS))
    parser.add_argument("--profiles", type=int, default=10, help="profiles of each model")
    parser.add_argument("--random", type=int, default=4, help="random policies of each profile")
    parser.add_argument("--batches", type=int, default=SEEDS_OF_PROFILE, help="of each profile")
    parser.add_argument("--run", type=Path, default=Path("intervals-run"))
    parser.add_argument("--summary", action="store_true", help="only print what --run has")
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    for seed in range(0 if arguments.summary else arguments.profiles):
        for name in names:
            path = arguments.run / f"{name}-{seed}.json"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                content = measured(
                    name, seed, arguments.random, path.with_suffix(".profile.json"), arguments.batches
                )
                path.write_text(json.dumps(content), "utf-8")
                print(f"{path}: measured", flush=True)
    for name in names:
        result = summary(name, arguments.run)
        print(json.dumps(result, indent=2))
        if not arguments.summary:
            append("intervals", result)


@cache
def trained(name: str) -> dict[str, Tensor]:
    """Return the weights after a few plain steps."""
    subject = SUBJECTS[name]
    torch.manual_seed(1)
    model = subject.model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        subject.loss(model, subject.batch(subject.batch_size)).backward()
        optimizer.step()
    return model.state_dict()


def workload_of(name: str, seed: int) -> mt.Workload:
    subject, weights = SUBJECTS[name], trained(name)

    def model() -> nn.Module:
        built = subject.model()
        built.load_state_dict(weights)
        return built.train()

    return mt.Workload(model, subject.batch, subject.loss, batch_size=subject.batch_size, seed=seed)


def measured(name: str, seed: int, count: int, profile_path: Path, batches: int) -> list[dict[str, Any]]:
    """Return the policies of one profile, and the truth of each."""
    workload = workload_of(name, seed)
    profile = mt.profile(workload, seeds=batches, path=profile_path)
    policies = [*solved(profile), *drawn(profile, seed, count)]
    errors: list[list[float]] = [[] for _ in policies]
    joint = JointError(workload, own=profile.own_noise)
    for draw in range(UNSEEN, UNSEEN + BATCHES):  # in this order, each exact gradient is computed once
        for (_, policy), parts in zip(policies, errors, strict=True):
            found = joint.errors(policy, [(draw, number) for number in range(SEEDS)])
            parts.extend(error.ratio for error in found)
    return [
        {"kind": kind, "policy": policy.dumps(), "errors": parts, "truth": statistics.fmean(parts)}
        for (kind, policy), parts in zip(policies, errors, strict=True)
    ]


def compared(path: Path) -> Iterator[dict[str, Any]]:
    """Yield prediction and truth of the policies in a file of `measured`."""
    profile = Profile.load(path.with_suffix(".profile.json"))
    for row in json.loads(path.read_text("utf-8")):
        predicted = profile.predict(mt.Policy.parse(row["policy"]))
        assert predicted.gradient_noise_ratio_interval is not None
        low, high = predicted.gradient_noise_ratio_interval
        yield {**row, "predicted": predicted.gradient_noise_ratio, "low": low, "high": high}


def solved(profile: mt.Profile) -> Iterator[tuple[str, mt.Policy]]:
    """Yield the policies solved for the saved bytes of uniform ones."""
    for level in LEVELS:
        limit = profile.predict(mt.Policy.uniform(level=level)).saved_bytes
        plan = mt.search_policy(profile, "100%", max_saved=limit, objective="error")
        yield f"solved {level}", plan.policy


def drawn(profile: mt.Profile, seed: int, count: int) -> Iterator[tuple[str, mt.Policy]]:
    """Yield random policies; layers that share a tensor get the same option."""
    generator = random.Random(seed)
    for number in range(count):
        least = 1 + number % 4
        options = [EXACT, *(option for option in full_grid() if option.bits >= least)]
        settings = {
            layer: option
            for group in profile.groups
            for option in [generator.choice(options)]
            for layer in group
        }
        rows = ((layer.tag, layer.index, layer.name, settings[layer.name]) for layer in profile.layers)
        yield f"random {least}", mt.Policy.from_assignments(rows)


def summary(name: str, folder: Path) -> dict[str, Any]:
    """Return coverage, width and ratio of measured to predicted, for each kind of policy."""
    paths = [path for path in sorted(folder.glob(f"{name}-*.json")) if ".profile" not in path.name]
    rows = [row for path in paths for row in compared(path)]
    result: dict[str, Any] = {"subject": name, "profiles": len(paths)}
    for kind in ("random", "solved", *(f"solved {level}" for level in LEVELS)):
        chosen = [row for row in rows if row["kind"].startswith(kind)]
        if chosen:
            result[kind] = {
                "policies": len(chosen),
                "covered": statistics.fmean(row["low"] <= row["truth"] <= row["high"] for row in chosen),
                "width": statistics.median(row["high"] / row["low"] for row in chosen),
                "measured / predicted": statistics.median(row["truth"] / row["predicted"] for row in chosen),
            }
    return result


if __name__ == "__main__":
    main()
