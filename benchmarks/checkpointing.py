"""How do policies behave under gradient checkpointing? DeiT-Ti for images of 96 × 96, GPT-2 of 4 layers.

    python benchmarks/checkpointing.py

The policies are uniform 4 bits, the same with `store: derive`, and one searched with saved bytes half way
from uniform to plain. For each: predicted and measured saved bytes, the gradient error, and the loss after a
few steps of training.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import append
from torch import Tensor, nn
from transformers import DeiTConfig, DeiTForImageClassification, GPT2Config, GPT2LMHeadModel

import mesa_tune as mt
from mesa_tune.measure.errors.joint_error import JointError

KINDS = {"none": None, "not reentrant": False, "reentrant": True}
OPTIONS = [mt.LayerSettings(level=level) for level in (4, 16, 256)]
SEEDS = 4
STEPS = 5
BATCH = 4
PIXELS, TOKENS = 96, 64


def deit() -> nn.Module:
    config = DeiTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768, image_size=PIXELS)
    return DeiTForImageClassification(config)


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=4, vocab_size=8192, use_cache=False))


def images(count: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, PIXELS, PIXELS), "labels": torch.randint(0, 2, (count,))}


def tokens(count: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 8192, (count, TOKENS))
    return {"input_ids": ids, "labels": ids}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Tensor]]]] = {
    "DeiT-Ti": (deit, images),
    "GPT-2, 4 layers": (gpt2, tokens),
}


def workload(name: str, reentrant: bool | None) -> mt.Workload:
    """Return the model's workload with one kind of checkpointing (None: without)."""
    make, batch = MODELS[name]

    def model() -> nn.Module:
        made = make().train()
        if reentrant is not None:
            made.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return made

    return mt.Workload(model, batch, lambda model, batch: model(**batch).loss, batch_size=BATCH)


def policies(profile: mt.Profile) -> Iterator[tuple[str, mt.Policy]]:
    uniform = mt.Policy.uniform(level=16)
    yield "uniform 16", uniform
    yield "derive", mt.Policy.uniform(level=16, store="derive")
    saved = (profile.saved_bytes + profile.predict(uniform).saved_bytes) // 2
    yield "searched", mt.search_policy(profile, "100%", max_saved=saved, objective="error").policy


def trained(work: mt.Workload, policy: mt.Policy) -> float:
    """Return the loss after a few steps under `policy`."""
    torch.manual_seed(0)
    model = mt.convert(work.build(), policy, seed=0)
    optimizer, batch = torch.optim.AdamW(model.parameters(), 1e-4), work.make_batch()
    loss = torch.zeros(())
    for _ in range(STEPS):
        loss = work.compute_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main() -> None:
    rows = []
    for name in MODELS:
        for kind, reentrant in KINDS.items():
            work = workload(name, reentrant)
            profile = mt.profile(work, options=OPTIONS, seeds=1)
            for label, policy in policies(profile):
                check = mt.verify(work, policy, steps=2, seeds=1)
                errors = JointError(work).errors(policy, [(0, seed) for seed in range(SEEDS)])
                error = statistics.fmean(each.error for each in errors)
                row = {
                    "model": name, "checkpointing": kind, "policy": label,
                    "plain saved": profile.saved_bytes, "predicted": profile.predict(policy).saved_bytes,
                    "measured": check.policy.saved_bytes, "gradient error": error,
                    "loss": trained(work, policy),
                }  # fmt: skip
                rows.append(row)
                print(row, flush=True)
    print(f"appended to {append('checkpointing', {'subject': 'checkpointing', 'rows': rows})}")


if __name__ == "__main__":
    main()
