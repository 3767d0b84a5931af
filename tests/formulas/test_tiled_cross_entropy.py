"""`tile` of a loss: its gradients are those of the whole, and nothing as large as the logits is saved."""

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import compress, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mesa_tune as mt
from mesa_tune import notice
from mesa_tune.conversion import model as conversion_model
from mesa_tune.errors import RunError
from mesa_tune.formulas.tiled_cross_entropy import TILED_CROSS_ENTROPY, _in_slices
from mesa_tune.measure.memory.meter import Meter
from tests.conformance.running import gradients

CLASSES, WIDTH, BATCH, LENGTH = 512, 32, 4, 48
LOGIT_BYTES = 4 * BATCH * LENGTH * CLASSES

# Two orders of summation of a float32 gradient are within 2e-6 of each other: on a processor with AVX2 alone,
# PyTorch's gradient is 1.07e-6 from that of float64, and the tiled one 0.83e-6.
ROUNDING = 2e-6


class Words(nn.Module):
    """A small language model: `head` may share its weight with the embedding."""

    def __init__(self, *, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.body(self.embedding(ids)))


IDS = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
TARGETS = IDS.roll(1, 1).clone()
TARGETS[0, :7] = -100
NEXT = TARGETS[:, 1:].flatten()
WEIGHTS = torch.linspace(0.1, 2, CLASSES)
SOFT = torch.softmax(torch.arange(1.0 * BATCH * CLASSES * LENGTH).view(BATCH, CLASSES, LENGTH).sin(), 1)

Loss = Callable[[Tensor], Tensor]


def flat(logits: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), TARGETS.flatten(), **options)


class WordsWithLoss(Words):
    """Returns its loss."""

    def forward(self, ids: Tensor) -> Tensor:
        return flat(super().forward(ids))


TILED: dict[str, Loss] = {
    "flat": flat,
    "sum": lambda y: flat(y, reduction="sum"),
    "view": lambda y: F.cross_entropy(y.view(-1, CLASSES), TARGETS.view(-1)),
    "float": lambda y: flat(y.float()),
    "double": lambda y: flat(y.double()),
    "shifted, copied": lambda y: F.cross_entropy(y[..., :-1, :].contiguous().view(-1, CLASSES), NEXT),
    "shifted, reshaped": lambda y: F.cross_entropy(y[:, :-1].reshape(-1, CLASSES), NEXT),
    "one sample": lambda y: F.cross_entropy(y[1], TARGETS[1]),
    "every second": lambda y: F.cross_entropy(y[:, ::2].flatten(0, 1), TARGETS[:, ::2].flatten()),
    "classes second": lambda y: F.cross_entropy(y.transpose(1, 2), TARGETS),
    "permuted": lambda y: F.cross_entropy(y.permute(1, 2, 0), TARGETS.t()),
    "some classes": lambda y: F.cross_entropy(y[..., 3:-12].flatten(0, 1), TARGETS.flatten().clamp(0, 400)),
    "half of the classes": lambda y: F.cross_entropy(y.view(-1, 2, 256)[:, 1], TARGETS.flatten() % 256),
    "ignored class": lambda y: F.cross_entropy(y.flatten(0, 1), IDS.flatten() // 32, ignore_index=0),
    "smoothed": lambda y: flat(y, label_smoothing=0.1),
    "weighted": lambda y: flat(y, weight=WEIGHTS),
    "weighted, smoothed": lambda y: flat(y, weight=WEIGHTS, label_smoothing=0.2, reduction="sum"),
    "soft": lambda y: F.cross_entropy(y.transpose(1, 2), SOFT),
    "soft, weighted": lambda y: F.cross_entropy(y.mT, SOFT, weight=WEIGHTS, label_smoothing=0.1),
    "other consumer": lambda y: flat(y) + 1e-2 * y.logsumexp(-1).square().mean(),
    "two losses": lambda y: flat(y) + F.cross_entropy(y[0], TARGETS[1], reduction="sum"),
    "scaled": lambda y: 1024 * flat(y),
}

UNTILED: dict[str, tuple[Loss, str]] = {
    "per row": (lambda y: flat(y, reduction="none").sum(), "reduction"),
    "scaled logits": (lambda y: flat(y * 2), "unchanged output"),
    "masked logits": (lambda y: flat(y.masked_fill(y > 3, 0)), "unchanged output"),
    "written in place": (lambda y: flat(y.mul_(2)), "unchanged output"),
    "copied twice": (lambda y: flat(y.double().contiguous().clone()), "unchanged output"),
    "every second class": (lambda y: F.cross_entropy(y[..., ::2].mT, TARGETS % 256), "unchanged output"),
    "other loss": (lambda y: F.mse_loss(y, torch.zeros_like(y)), "mse_loss has no slices"),
}


def policy(tile: int = 4, *, level: int | None = None) -> mt.Policy:
    """A policy that changes nothing but the loss, or stores the rest at `level`."""
    rule = f"on loss:\n    by_index: all\n    store: exact\n    tile: {tile}\n"
    return mt.Policy.uniform(level, tile=tile) if level else mt.Policy.parse("# mesa-tune policy 1\n" + rule)


def distance(mine: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    """The largest relative error of a parameter's gradient."""
    assert mine.keys() == plain.keys()
    return max(float((mine[name] - plain[name]).norm() / plain[name].norm()) for name in plain)


class Formulas:
    """How often a loss ran by the tiled formula."""

    runs = 0


@pytest.fixture(autouse=True)
def formulas(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forward = TILED_CROSS_ENTROPY.forward

    def counted(*arguments: Any) -> Any:
        Formulas.runs += 1
        return forward(*arguments)

    Formulas.runs = 0
    object.__setattr__(TILED_CROSS_ENTROPY, "forward", counted)
    monkeypatch.setattr(notice, "_given", set())  # warnings of earlier tests
    conversion_model._finished.clear()  # and conversions
    yield
    object.__setattr__(TILED_CROSS_ENTROPY, "forward", forward)


def step(model: nn.Module, loss: Loss, under: mt.Policy | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a copy of `model`; the loss is outside it."""
    model = copy.deepcopy(model)
    if under is not None:
        mt.convert(model, under)
    with nullcontext() if under is None else mt.compress_saved(under):
        value = loss(model(IDS))
    value.backward()
    return value.detach(), gradients(model)


def check(model: nn.Module, loss: Loss, tile: int = 4, *, runs: int = 1) -> None:
    """The loss is bitwise that of PyTorch, its gradients are equal, and `runs` losses were tiled."""
    value, plain = step(model, loss)
    tiled, mine = step(model, loss, policy(tile))
    assert Formulas.runs == runs
    assert torch.equal(tiled, value)
    assert tiled.dtype == value.dtype
    assert distance(mine, plain) < ROUNDING


@pytest.mark.parametrize(
    ("name", "tile"),
    [*((name, 7) for name in TILED), *((name, 2) for name in ("flat", "every second", "permuted", "soft"))],
)
def test_loss_is_bitwise_and_gradients_are_equal(name: str, tile: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(Words(), TILED[name], tile, runs=2 if name == "two losses" else 1)


def test_more_slices_than_rows_are_as_near_as_one() -> None:
    """Sums of single rows are rounded more often: up to twice the error of PyTorch's own against float64."""
    exact = {name: grad.float() for name, grad in step(Words().double(), flat)[1].items()}
    errors = [distance(step(Words(), flat, under)[1], exact) for under in (policy(1000), None)]
    assert Formulas.runs == 1
    assert errors[0] < 2 * errors[1]


@pytest.mark.parametrize(
    "loss",
    [lambda y: F.cross_entropy(y[1, 3], TARGETS[1, 3]), lambda y: F.cross_entropy(y[:, -1], TARGETS[:, -1])],
)
@pytest.mark.parametrize("bias", [True, False])
def test_single_rows_and_a_head_without_bias(loss: Loss, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesa_tune.conversion.model.MIN_ELEMENTS", 100)
    check(Words(bias=bias), loss)


@pytest.mark.parametrize("name", UNTILED)
def test_what_cannot_be_tiled_is_named_and_right(name: str) -> None:
    loss, why = UNTILED[name]
    with pytest.warns(UserWarning, match=rf"`tile` of 'loss\.\w+\.0' has no effect: .*{why}"):
        check(Words(), loss, runs=0)


@pytest.mark.parametrize(
    ("frozen", "tied"),
    [
        *((names, False) for names in ("head", "body", "(?!head)", "head.bias")),
        *(("", True), ("head.bias", True)),
    ],
)
def test_frozen_and_tied_parameters(frozen: str, tied: bool) -> None:
    model = Words(tied=tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or re.match(frozen, name) is None)
    check(model, flat)


def test_loss_inside_the_model() -> None:
    model = WordsWithLoss()
    plain, converted = copy.deepcopy(model), mt.convert(copy.deepcopy(model), policy())
    for _ in range(3):  # the first forward plans, the second caches, the third runs by what is cached
        a, b = plain(IDS), converted(IDS)
        assert torch.equal(a, b)
        a.backward()  # gradients add up
        b.backward()
    assert Formulas.runs == 3
    assert distance(gradients(converted), gradients(plain)) < ROUNDING


def twice(head: Any, hidden: Tensor) -> Any:
    return flat(head(hidden)) + 3 * flat(head(hidden.detach() * 2))


def of_torch(head: Any, hidden: Tensor) -> Any:
    targets = TARGETS.flatten()
    return F.linear_cross_entropy(hidden.flatten(0, 1), head.weight, targets, linear_bias=head.bias)


@pytest.mark.parametrize(("run", "runs"), [(twice, 2), (of_torch, 1)])
def test_a_head_that_is_called_outside_the_model(run: Callable[..., Any], runs: int) -> None:
    models = Words(), Words()
    contexts: list[AbstractContextManager[Any]] = [nullcontext(), mt.compress_saved(policy())]
    for model, context in zip(models, contexts, strict=True):
        with context:
            loss = run(model.head, model.body(model.embedding(IDS)))
        loss.backward()
    assert Formulas.runs == runs
    assert distance(*(gradients(model) for model in reversed(models))) < ROUNDING


@pytest.mark.parametrize("loss", [flat, TILED["float"], TILED["shifted, copied"], TILED["soft"]])
def test_autocast_is_as_near_as_pytorch(loss: Loss) -> None:
    model = Words()
    with torch.autocast("cpu", torch.bfloat16):
        value, plain = step(model, loss)
        tiled, mine = step(model, loss, policy())
    exact = step(model, loss)[1]
    assert Formulas.runs == 1
    assert torch.equal(tiled, value)
    # bfloat16 has 8 bits: PyTorch itself is 0.2 to 0.6 % from float32 here.
    assert distance(mine, exact) < 1.5 * distance(plain, exact)
    assert distance(mine, plain) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_dtypes(dtype: torch.dtype) -> None:
    exact = step(Words(), flat)[1]
    model = Words().to(dtype)
    value, plain = step(model, flat)
    tiled, mine = step(model, flat, policy())
    assert Formulas.runs == 1
    assert torch.equal(tiled, value)
    assert {grad.dtype for grad in mine.values()} == {dtype}
    if dtype == torch.float64:
        assert distance(mine, plain) < 1e-14
    else:  # the probabilities are computed in 32 bits, PyTorch's in 16
        floats = [{name: grad.float() for name, grad in grads.items()} for grads in (mine, plain)]
        assert distance(floats[0], exact) < 1.2 * distance(floats[1], exact)


def test_second_backward_and_create_graph() -> None:
    model = mt.convert(Words(), policy())
    with mt.compress_saved(policy()):
        loss = flat(model(IDS))
    loss.backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    loss.backward(retain_graph=True)
    assert all(torch.equal(grad, first[name]) for name, grad in gradients(model).items())
    with pytest.raises(RunError, match="create_graph"):
        loss.backward(create_graph=True)


def test_nothing_runs_without_gradients() -> None:
    model = mt.convert(Words(), policy())
    with torch.no_grad(), mt.compress_saved(policy()):
        assert torch.equal(flat(model(IDS)), flat(Words()(IDS)))
    assert Formulas.runs == 0


@pytest.mark.parametrize("by", ["hook", "retain_grad"])
@pytest.mark.parametrize("when", ["before the loss", "after the loss"])
def test_the_gradient_of_the_logits_is_there_for_who_wants_it(by: str, when: str) -> None:
    def watch(logits: Tensor, seen: list[Tensor]) -> None:
        if by == "hook":
            logits.register_hook(lambda grad: seen.append(grad.clone()))
        else:
            logits.retain_grad()
            seen.append(logits)

    def run(model: nn.Module, under: mt.Policy) -> tuple[Tensor, dict[str, Tensor]]:
        seen: list[Tensor] = []
        with mt.compress_saved(under):
            logits = model(IDS)
            if when == "before the loss":
                watch(logits, seen)
            loss = F.cross_entropy(logits.transpose(1, 2), TARGETS)
        if when == "after the loss":
            watch(logits, seen)
        loss.backward()
        grad = seen[0] if seen[0].grad_fn is None else seen[0].grad
        assert grad is not None
        return grad, gradients(model)

    model = Words()
    expected, plain = run(copy.deepcopy(model), mt.Policy())
    grad, mine = run(mt.convert(model, policy()), policy())
    assert Formulas.runs == 1
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-8)
    assert distance(mine, plain) < ROUNDING


@pytest.mark.parametrize("wanted", [(True, False), (True, True), (False, True)])
def test_autograd_grad_of_logits_and_weight(wanted: tuple[bool, bool]) -> None:
    def run(model: Any, under: mt.Policy) -> tuple[Tensor, ...]:
        with mt.compress_saved(under):
            logits = model(IDS)
            loss = flat(logits)
        return torch.autograd.grad(loss, [*compress((logits, model.head.weight), wanted)])

    model = Words()
    expected = run(copy.deepcopy(model), mt.Policy())
    grads = run(mt.convert(model, policy()), policy())
    assert Formulas.runs == 1
    for grad, other in zip(grads, expected, strict=True):
        assert (grad - other).norm() < ROUNDING * other.norm()


def test_hooks_of_the_head_see_its_gradient() -> None:
    """A full backward hook puts a function between the head and the loss, which is then not tiled."""
    model, seen = Words(), []
    mt.convert(model, policy())
    model.head.register_full_backward_hook(lambda *given: seen.append(given[2][0]))
    with mt.compress_saved(policy()), pytest.warns(UserWarning, match="has no effect"):
        loss = flat(model(IDS))
    loss.backward()
    assert Formulas.runs == 0
    assert seen[0].norm() > 0


@pytest.mark.parametrize("what", ["logits", "logits, then cast", "copy"])
def test_what_is_written_without_a_trace_in_the_graph(what: str) -> None:
    def loss(logits: Tensor) -> Tensor:
        written = logits.double() if what == "copy" else logits
        with torch.no_grad():
            written[..., 100:] = -30
        return flat(written.double() if what == "logits, then cast" else written)

    with pytest.warns(UserWarning, match="has no effect"):
        check(Words(), loss, runs=0)


@pytest.mark.parametrize("part", ["head", "head and loss", "body"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts(part: str, reentrant: bool) -> None:
    def run(model: Any) -> Any:
        hidden = model.embedding(IDS)
        if part == "body":
            return flat(model.head(checkpoint(model.body, hidden, use_reentrant=reentrant)))
        hidden = model.body(hidden)
        if part == "head":
            return flat(checkpoint(model.head, hidden, use_reentrant=reentrant))
        return checkpoint(lambda h: flat(model.head(h)), hidden, use_reentrant=reentrant)

    model = Words()
    plain, other = copy.deepcopy(model), mt.convert(model, policy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(plain).backward()
        with mt.compress_saved(policy()):
            loss = run(other)
        loss.backward()
    assert (Formulas.runs == 1) == (part == "body")
    assert distance(gradients(other), gradients(plain)) < ROUNDING


def test_a_changed_weight_is_not_used() -> None:
    def run(model: Any) -> Tensor:
        logits = model(IDS)
        with torch.no_grad():
            model.head.weight.mul_(1.5)
        return flat(logits)

    with mt.compress_saved(policy()), pytest.warns(UserWarning, match="has no effect"):
        run(Words())


@pytest.mark.parametrize("level", [None, 16])
def test_nothing_as_large_as_the_logits_is_saved(level: int | None) -> None:
    """In backward, two tensors of one of 8 slices exist: a quarter of the logits."""
    model = mt.convert(Words(), policy(8, level=level))
    saved = extra = LOGIT_BYTES
    for _ in range(2):
        with Meter() as meter:
            with mt.compress_saved(policy(8, level=level)):
                loss = flat(model(IDS))
            saved = meter.live_bytes
            meter.reset_peak()
            loss.backward()
            extra = meter.tensor_peak - saved
        model.zero_grad()
    assert saved < LOGIT_BYTES / 2
    assert extra < LOGIT_BYTES / 2 + 4 * sum(p.numel() for p in model.parameters())


def test_forward_has_the_logits_once() -> None:
    model = mt.convert(Words(), policy(8))
    with Meter() as meter, mt.compress_saved(policy(8)):
        flat(model(IDS))
    with Meter() as plain:
        flat(Words()(IDS))
    assert meter.tensor_peak < plain.tensor_peak - LOGIT_BYTES * (1 - 1 / 16)


def test_rest_of_the_model_stores_by_its_settings() -> None:
    model = Words()
    value, plain = step(model, flat)
    tiled, mine = step(model, flat, policy(4, level=16))
    assert Formulas.runs == 1
    assert torch.equal(tiled, value)
    for name in ("head.weight", "head.bias"):  # nothing lossy before the head
        assert (mine[name] - plain[name]).norm() < ROUNDING * plain[name].norm()
    assert 1e-4 < distance(mine, plain) < 0.2


def test_compiled_code_says_that_tile_has_no_effect() -> None:
    model = mt.convert(WordsWithLoss(), policy())
    with pytest.warns(UserWarning, match="compiled code"):
        loss = torch.compile(model, backend="aot_eager", fullgraph=True)(IDS)
    loss.backward()
    value, plain = step(Words(), flat)
    torch.testing.assert_close(loss.detach(), value)
    assert distance(gradients(model), plain) < ROUNDING


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("classes", [500, 513, 32000, 50257])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_on_cuda_slices_are_bitwise_the_whole_loss(classes: int, dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    whole = (3 * torch.randn(203, classes, device="cuda")).to(dtype)
    target = torch.randint(classes, (203,), device="cuda")
    target[::7] = -100
    layouts = (whole, whole[:, 1:], whole.t().contiguous().t())
    for logits, reduction in product(layouts, ("mean", "sum")):
        options: Any = {"ignore_index": -100, "reduction": reduction}
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            expected = F.cross_entropy(logits, target.clamp(max=logits.shape[1] - 1), **options)
            found = _in_slices(logits, target.clamp(max=logits.shape[1] - 1), 4, options)
        assert torch.equal(found, expected)
