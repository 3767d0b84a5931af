"""The models of `search.py` in training: by a policy, and by what users do by hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import code_of, in_turn
from greedy import BITS, greedy
from own_ratio import OwnRatio
from search_subjects import SUBJECTS, Subject
from step import checkpoint_blocks
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from truth import LiveStorages

import mesa_tune as mt
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.profile import Profile
from mesa_tune.search.objectives import MAX_NOISE_RATIO

BUILD = Path(__file__).resolve().parents[1] / "build" / "search"
STEPS = 60
UNSEEN = 700_000
_ATEN = torch.ops.aten
PRODUCTS = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}


class Method(NamedTuple):
    """How to train: by a policy, or with the first blocks checkpointed; `selective`: these keep products."""

    policy: mt.Policy | None = None
    checkpointed: int = 0
    selective: bool = False


class Model:
    """A trained subject with its profile."""

    def __init__(self, name: str) -> None:
        self.name, self.subject = name, SUBJECTS[name]
        self.trained = trained(self.subject)
        self.workload = mt.Workload(
            self.build, self.subject.batch, self.subject.loss, batch_size=self.subject.batch_size
        )
        self._known: dict[Method, int] = {}
        path = BUILD / f"{name}-{code()}.json"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            mt.profile(self.workload).save(path)
        self.profile = Profile.load(path)
        names = [name for name, block in self.build().named_modules() if is_block(self.subject, block)]
        self.blocks = [name for name in names if name in self.profile.timeline.modules]
        assert self.blocks == names, (names, self.profile.timeline.modules)

    def build(self) -> nn.Module:
        model = self.subject.build()
        model.load_state_dict(self.trained)
        return model.train()

    def predicted_bytes(self, method: Method) -> int:
        """Return the predicted peak by a method."""
        return self.checkpointed_bytes(method) if method.policy is None else self.bytes(method.policy)

    def bytes(self, policy: mt.Policy) -> int:
        """Return the predicted peak under a policy."""
        return self.profile.predict(policy).peak_bytes

    def checkpointed_bytes(self, method: Method) -> int:
        """Return the estimated peak by a method without a policy."""
        if method not in self._known:
            build = partial(changed, self.subject, method)
            work = mt.Workload(
                lambda: build(self.build()),
                self.subject.batch,
                self.subject.loss,
                batch_size=self.subject.batch_size,
            )
            self._known[method] = mt.estimate(work).peak_bytes
        return self._known[method]

    def four_bits(self) -> mt.Policy:
        """Return uniform 4 bits, with blocks that run again from inputs of 4 bits."""
        again = dict.fromkeys(self.blocks, LayerSettings(level=16, store="recompute"))
        return mt.Policy.uniform(level=16).rerunning(again)


def code() -> str:
    """Return a hash of what profiles and searches depend on."""
    return code_of(("",), Path(__file__).with_name("search_subjects.py"))


def trained(subject: Subject) -> dict[str, Tensor]:
    """Return the weights after plain steps."""
    torch.manual_seed(1)
    model = subject.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=subject.learning_rate)
    for _ in range(STEPS):
        optimizer.zero_grad()
        subject.loss(model, subject.batch(subject.batch_size)).backward()
        optimizer.step()
    return model.state_dict()


def is_block(subject: Subject, module: nn.Module) -> bool:
    return type(module).__name__ == subject.block


def limits(model: Model) -> dict[str, int]:
    """Return the limits on the peak, with workspaces."""
    plain, checkpointing = map(model.checkpointed_bytes, (Method(), Method(None, len(model.blocks))))
    lossy = [*map(uniform, BITS), model.four_bits()]
    least = min([checkpointing, *(model.bytes(policy) for policy in lossy if is_quiet(model, policy))])
    return {"midway": (plain + checkpointing) // 2, "checkpointing": checkpointing, "least": least}


def uniform(bits: int) -> mt.Policy:
    return mt.Policy.uniform(level=2**bits)


def is_quiet(model: Model, policy: mt.Policy) -> bool:
    """Return whether the noise ratio is predicted within the limit."""
    ratio = model.profile.predict(policy).gradient_noise_ratio
    return ratio is not None and ratio <= MAX_NOISE_RATIO


def rivals(model: Model, limit: int) -> dict[str, Method]:
    """Return the rivals that are predicted to fit."""
    count, found = len(model.blocks), {}
    by_hand = {f"checkpoint {n} of {count} blocks": Method(None, n) for n in range(1, count + 1)}
    by_hand["checkpoint, keeping products"] = Method(None, count, selective=True)
    fitting = {
        title: method for title, method in by_hand.items() if model.checkpointed_bytes(method) <= limit
    }
    found |= dict(itertools.islice(fitting.items(), 1))  # as few blocks as fit
    found |= {title: method for title, method in fitting.items() if method.selective}
    policies: dict[str, mt.Policy | None] = {f"uniform {bits} bits": uniform(bits) for bits in BITS}
    fits = [title for title, policy in policies.items() if policy and model.bytes(policy) <= limit]
    policies = {title: policies[title] for title in fits[:1]}
    policies["greedy by errors"] = greedy(model.profile, model.bytes, limit, law=False)
    policies["greedy by the law of noise"] = greedy(model.profile, model.bytes, limit, law=True)
    policies["checkpoint with 4 bits"] = (
        model.four_bits() if model.bytes(model.four_bits()) <= limit else None
    )
    return {**found, **{title: Method(policy) for title, policy in policies.items() if policy is not None}}


class Running:
    """A model in training by a method, with a loop of its own."""

    def __init__(self, model: Model, method: Method) -> None:
        self.subject, self.method = model.subject, method
        self.model = model.build()
        if method.policy is not None:
            mt.convert(self.model, method.policy, seed=0)
        changed(self.subject, method, self.model)
        torch.manual_seed(0)
        self.batch = self.subject.batch(self.subject.batch_size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward(self.batch, 0)
        self.optimizer.step()

    def backward(self, batch: Any, seed: int) -> None:
        """Run forward and backward, with the same random numbers for every method."""
        torch.manual_seed(seed)
        if self.method.policy is None:
            loss = self.subject.loss(self.model, batch)
        else:
            with mt.compress_saved(self.method.policy, seed=seed):
                loss = self.subject.loss(self.model, batch)
        loss.backward()

    def gradient(self, batch: Any, seed: int) -> list[Tensor]:
        self.optimizer.zero_grad()
        self.backward(batch, seed)
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def peak(self) -> int:
        """Return the most live bytes of the second step."""
        self.step()
        with LiveStorages() as storages:
            self.optimizer.zero_grad()
            state = [value for values in self.optimizer.state.values() for value in values.values()]
            storages.see_all([*self.model.parameters(), *self.model.buffers(), state, self.batch])
            del state
            self.step()
        return storages.peak


def times_in_turn(runs: Mapping[str, Running], rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of steps of each run, taken in turn."""
    for run in [*runs.values()] * 2:  # plans the calls
        run.step()
    return in_turn({name: run.step for name, run in runs.items()}, rounds)


def forward_bytes(subject: Subject) -> int:
    """Return the most live bytes of a forward without gradients, besides weights and batch."""
    torch.manual_seed(0)
    model, batch = subject.build(), subject.batch(subject.batch_size)
    with torch.no_grad(), LiveStorages() as storages:
        storages.see_all([*model.parameters(), *model.buffers(), batch])
        before = storages.alive
        subject.loss(model, batch)
    return storages.peak - before


def changed(subject: Subject, method: Method, model: nn.Module) -> nn.Module:
    """Return the model with the first blocks checkpointed, as `method` says."""
    contexts = partial(create_selective_checkpoint_contexts, keeping_products)
    options = {"context_fn": contexts} if method.selective else {}
    checkpoint_blocks(model, subject.block, method.checkpointed, **options)
    return model


def keeping_products(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if func in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def noise_ratios(model: Model, runs: Mapping[str, Running], batches: int) -> dict[str, float]:
    """Return the noise ratio of each lossy run, by `OwnRatio`, on unseen batches."""
    plain = Running(model, Method())
    lossy = {name: run for name, run in runs.items() if run.method.policy is not None}
    errors, noise = dict.fromkeys(lossy, torch.zeros(())), OwnRatio(plain.model)
    for number in range(batches):
        torch.manual_seed(UNSEEN + number)
        batch = model.subject.batch(model.subject.batch_size)
        exact = plain.gradient(batch, number)
        noise.add(exact)
        for name, run in lossy.items():
            pairs = zip(run.gradient(batch, number), exact, strict=True)
            errors[name] = errors[name] + noise.parts([after - before for after, before in pairs]) / batches
    return {name: noise.ratio(error) for name, error in errors.items()}
