"""Checkpointed models: whatever kind of checkpoint runs a part again, the gradient is as good as without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mesa_tune as mt
from mesa_tune.measure.memory.meter import StepMemory, measure_step
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import LayerSettings
from tests.builders import Block, encodings, known, llama, own_loss, t5_config, words, workload
from tests.compat_measures import error
from tests.step_memory import Composed, swept, without_variants

WIDTH, LENGTH, SAMPLES = 64, 32, 4
Part = Callable[[Tensor], Tensor]
Run = Callable[[Part, Tensor], Tensor]

POLICIES = {
    "8-bits": Policy.uniform(level=256),
    "4-bits": Policy.uniform(level=16),
    "derive": Policy.uniform(level=16, store="derive"),
}


class GatedBlock(Block):
    """A block with a gated perceptron; layers in it can derive, and share."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        y: Tensor = self.fc2(F.gelu(self.fc1(h)) * self.up(h))
        return x + y


def network_of(run: Run, blocks: int = 2) -> Any:
    """Blocks, each run by `run`, between two linear layers, the last of which derives from a norm."""

    def forward(model: Any, x: Tensor) -> Any:
        x = model.first(x)
        for block in model.blocks:
            x = model.run(block, x)
        return model.last(model.norm(x))

    ends = {"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 8)}
    inside = nn.ModuleList(GatedBlock() for _ in range(blocks))
    return Composed(forward, **ends, blocks=inside, norm=nn.LayerNorm(WIDTH), run=run)


def plainly(part: Part, x: Tensor) -> Tensor:
    return part(x)


def after_functions(part: Part, x: Tensor) -> Tensor:
    """The part behind functions that are no module's."""
    return part(F.gelu(x) * x + F.softmax(x, -1))


def after_silu(part: Part, x: Tensor) -> Tensor:
    return part(F.silu(x))


def again(part: Part, x: Tensor, **how: Any) -> Any:
    return checkpoint(part, x, **{"use_reentrant": False, **how})


reentrant = partial(again, use_reentrant=True)


def selective(policy: Any, part: Part, x: Tensor) -> Any:
    return again(part, x, context_fn=partial(create_selective_checkpoint_contexts, policy))


class Every:
    """A policy that saves the output of every `n`-th operator."""

    def __init__(self, n: int) -> None:
        self.n, self.count = n, 0

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        self.count += 1
        return CheckpointPolicy.PREFER_RECOMPUTE if self.count % self.n else CheckpointPolicy.PREFER_SAVE


PRODUCTS = [torch.ops.aten.addmm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]

# Each kind of checkpoint beside what it runs without one.
KINDS: dict[str, tuple[Run, Run]] = {
    "non-reentrant": (again, plainly),
    "to-the-end": (partial(again, early_stop=False), plainly),
    "reentrant": (reentrant, plainly),
    "functions": (lambda part, x: again(partial(after_functions, part), x), after_functions),
    "functions-reentrant": (lambda part, x: reentrant(partial(after_functions, part), x), after_functions),
    "nested": (lambda part, x: again(lambda y: again(part, again(F.silu, y)), x), after_silu),
    "reentrant-in-other": (lambda part, x: again(lambda y: reentrant(part, F.silu(y)), x), after_silu),
    "other-in-reentrant": (lambda part, x: reentrant(lambda y: again(part, F.silu(y)), x), after_silu),
    "once-of-twice": (lambda part, x: part(again(part, x)), lambda part, x: part(part(x))),
    "selective": (partial(selective, PRODUCTS), plainly),
    "selective-everything": (partial(selective, Every(1)), plainly),
    "selective-thirds": (partial(selective, Every(3)), plainly),
}


def stepped(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    value = loss()
    value.backward()
    return value.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def mean_error(model: nn.Module, loss: Callable[[nn.Module], Tensor], policy: Policy) -> float:
    """Over two steps, each with its own noise; the forward is the plain model's."""
    value, exact = stepped(model, lambda: loss(model))
    network = mt.convert(copy.deepcopy(model), policy, seed=1, min_elements=1024)
    found = [stepped(network, lambda: loss(network)) for _ in range(3)]
    assert all(torch.equal(each, value) for each, _ in found)
    return sum(error(each, exact) for _, each in found[1:]) / 2


def squared(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.square().mean()


@pytest.mark.parametrize(
    ("kind", "policy"),
    [*((kind, "derive") for kind in KINDS), ("reentrant-in-other", "4-bits"), ("selective", "8-bits")],
)
def test_gradient_error_is_as_without_checkpointing(kind: str, policy: str) -> None:
    run, without = KINDS[kind]
    network, x = network_of(run), torch.randn(SAMPLES, LENGTH, WIDTH)
    found = mean_error(network, lambda model: squared(model, x), POLICIES[policy])
    network.run = without
    expected = mean_error(network, lambda model: squared(model, x), POLICIES[policy])
    assert expected / 1.5 < found < 1.5 * expected


TEXT: dict[str, Any] = {"vocab_size": 128, "hidden_size": WIDTH, "intermediate_size": 128, "use_cache": False}
TEXT |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: llama(WIDTH, 1, use_cache=False),
    # Its experts' shapes coincide: what is saved wrongly raises nothing.
    "flex_olmo": lambda: transformers.FlexOlmoForCausalLM(
        transformers.FlexOlmoConfig(**TEXT, num_experts=4, num_experts_per_tok=2)
    ),
    # Its position bias reaches parts from outside.
    "t5": partial(
        transformers.T5ForConditionalGeneration, t5_config(WIDTH, dropout_rate=0.0, use_cache=False)
    ),
}


@pytest.mark.parametrize(
    ("name", "reentrant", "policy"),
    [
        *(("llama", False, "derive"), ("llama", True, "4-bits")),
        *(("flex_olmo", False, "4-bits"), ("flex_olmo", True, "derive")),
        *(("t5", False, "derive"), ("t5", True, "4-bits")),
    ],
)
def test_models_of_transformers(name: str, reentrant: bool, policy: str) -> None:
    model, batch = MODELS[name]().train(), words(SAMPLES, LENGTH)
    loss = partial(own_loss, batch=batch)
    expected = mean_error(model, loss, POLICIES["4-bits"])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    assert expected / 1.5 < mean_error(model, loss, POLICIES[policy]) < 1.5 * expected


def test_a_backward_stays_in_its_own_graph() -> None:
    """What derives in a branch of its own takes tensors of the trunk, whose graph is still to be used."""

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input * torch.rsqrt(input.square().mean(-1, keepdim=True))

    class Whole(nn.ModuleList):
        def forward(self, x: Tensor) -> Any:
            h = self[1](self[0](x))
            self[2](h.detach()).square().mean().backward()
            return h.square().mean()

    x = torch.randn(256, WIDTH)
    plain = Whole([nn.Linear(WIDTH, WIDTH), Scaled(1, 1).requires_grad_(False), nn.Linear(WIDTH, WIDTH)])
    _, exact = stepped(plain, lambda: plain(x))
    network = mt.convert(copy.deepcopy(plain), POLICIES["derive"], seed=1, min_elements=1024)
    for _ in range(2):
        _, found = stepped(network, lambda: network(x))
        assert error(found, exact) < 0.1


def test_equal_copies_are_one_in_a_part_that_runs_again() -> None:
    def counts(network: nn.Module) -> tuple[int, int]:
        """Encodings of the network's second forward, and of its backward."""
        mt.convert(network, POLICIES["4-bits"], seed=1, min_elements=1024)
        squared(network, x).backward()
        losses: list[Tensor] = []
        forward = encodings(lambda: losses.append(squared(network, x)))
        return len(forward), len(encodings(losses[0].backward))

    x, none = torch.randn(SAMPLES, LENGTH, WIDTH), network_of(plainly, blocks=0)
    assert counts(network_of(again))[1] == counts(network_of(plainly))[0] - counts(none)[0]


PRICED = ["non-reentrant", "reentrant"]
PROFILED = ["non-reentrant", "reentrant", "functions", "nested", "selective"]


def classifying(kind: str) -> mt.Workload:
    run, blocks = KINDS.get(kind, (plainly,))[0], 2 if kind in (*PRICED, "none") else 1
    return workload(
        lambda: network_of(run, blocks),
        lambda n: (torch.randn(n, LENGTH, WIDTH), torch.randint(8, (n,))),
        lambda model, batch: F.cross_entropy(model(batch[0]).mean(1), batch[1]),
        batch_size=SAMPLES,
    )


MIXED = Policy.parse("# mesa-tune policy 1\non fc layernorm attention:\n    by_index: all\n    level: 16\n")


@cache
def profiled(kind: str) -> mt.Profile:
    options = [LayerSettings(level=level) for level in (16, 256)] if kind in (*PRICED, "none") else []
    with nullcontext() if kind == "non-reentrant" else without_variants():
        return mt.profile(classifying(kind), options=options, seeds=2)


def measured(kind: str, policy: Policy) -> StepMemory:
    work = classifying(kind)
    model = mt.convert(work.build(), policy, seed=0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with mt.compress_saved(policy):
            return work.compute_loss(model, batch)

    return measure_step(model, work.make_batch(), loss, work.make_optimizer(model))


SWEPT = {*PROFILED} - {"non-reentrant"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *swept(((kind, name) for kind in PROFILED for name in ("derive", "mixed")), SWEPT),
        ("reentrant", "4-bits"),
    ],
)
def test_predicted_bytes_are_those_of_a_real_step(kind: str, name: str) -> None:
    policy = {**POLICIES, "mixed": MIXED}[name]
    predicted, found = profiled(kind).predict(policy), measured(kind, policy)
    assert predicted.saved_bytes == found.saved_bytes
    if (kind, name) == ("selective", "mixed"):  # it caches what layers of two kinds keep: an upper bound
        assert found.peak_bytes <= predicted.peak_bytes < 1.15 * found.peak_bytes
    else:
        assert predicted.peak_bytes == found.peak_bytes


@pytest.mark.parametrize("kind", PROFILED)
def test_a_profile_accounts_for_all_saved_bytes(kind: str) -> None:
    profile, found = profiled(kind), measured(kind, Policy.parse(""))
    predicted = profile.predict(Policy.parse(""))
    assert profile.saved_bytes == predicted.saved_bytes == found.saved_bytes
    assert profile.peak_bytes == predicted.peak_bytes == found.peak_bytes
    assert sum(layer.own_bytes for layer in profile.layers) == profile.saved_bytes


@pytest.mark.parametrize("kind", PRICED)
def test_errors_are_those_without_checkpoints(kind: str) -> None:
    # On the first batch, which measures all layers. Which of them the second measures, and which it infers,
    # depends on the order of layers, and that is another one in reentrant checkpoints: so does the common
    # factor by which whole steps calibrate all.
    expected, errors = (
        {layer.name: [option.ratios[0] for option in layer.options] for layer in profiled(each).layers}
        for each in ("none", kind)
    )
    factor = sum(map(sum, errors.values())) / sum(map(sum, expected.values()))
    assert factor == pytest.approx(1.0, rel=1e-2)
    for name, values in expected.items():
        assert errors[name] == pytest.approx([factor * value for value in values], rel=1e-3)


@pytest.mark.slow("training")
@pytest.mark.parametrize("kind", PRICED)
def test_a_searched_policy_keeps_its_word(kind: str) -> None:
    profile, work = profiled(kind), classifying(kind)
    budget = int(0.85 * profile.peak_bytes)
    plan = mt.search_policy(profile, budget, workload=work, trials=4, objective="error")
    check = mt.verify(work, plan.policy, predicted=plan.predicted, steps=1, seeds=2)
    assert check.policy.peak_bytes == plan.predicted.peak_bytes <= budget
    assert check.policy.saved_bytes == plan.predicted.saved_bytes
    predicted, found = known(plan.predicted.gradient_error), known(check.gradient_error)
    assert predicted / 3 < found < 3 * predicted
    assert found < known(mt.verify(work, POLICIES["4-bits"], steps=1, seeds=2).gradient_error)
