"""`tile` of modules (`on module:`): MLPs and attention run in slices, and nothing inside is ever whole."""

import copy
from collections import Counter, OrderedDict
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mesa_tune as mt
from mesa_tune import notice
from mesa_tune.conversion.sliced import has_slices
from mesa_tune.measure.memory.meter import measure_step
from mesa_tune.policy import Policy
from tests.builders import Calling, bert_config, gpt2_config, llama_config, t5_config
from tests.step_memory import Composed

WIDTH, HIDDEN = 32, 512
CUTS = [((8, 48, WIDTH), 3), ((2, 48, WIDTH), 16), ((1, 7, WIDTH), 2), ((40, WIDTH), 3)]


def perceptron(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), Calling(F.gelu), nn.Dropout(dropout), nn.Linear(HIDDEN, WIDTH)
    )


def residual(*mlps: nn.Module) -> nn.Module:
    """Blocks, each with a norm before any perceptron, and the way around both."""

    def block(mlp: nn.Module) -> nn.Module:
        return Composed(lambda m, x: x + m.mlp(m.norm(x)), norm=nn.LayerNorm(WIDTH), mlp=mlp)

    blocks = nn.Sequential(*map(block, mlps or (perceptron(), perceptron())))
    return nn.Sequential(OrderedDict(blocks=blocks))


def policy(*lines: str, names: str = "blocks.*.mlp", tile: int = 4) -> Policy:
    text = "\n".join(f"    {line}" for line in (f"by_name: {names}", f"tile: {tile}", *lines))
    return Policy.parse(f"# mesa-tune policy 1\non module:\n{text}\n")


def converted(model: nn.Module, chosen: Policy) -> Any:
    return mt.convert(copy.deepcopy(model), chosen, seed=1, min_elements=64)


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, and the gradients of parameters and input as one tensor."""
    x = x.clone().requires_grad_()
    y = model(x)
    found = torch.autograd.grad(y.square().sum(), (*model.parameters(), x))
    return y.detach(), torch.cat([each.flatten() for each in found])


@pytest.mark.parametrize(("shape", "tile"), CUTS, ids=str)
def test_from_exact_inputs_the_step_is_plains(shape: tuple[int, ...], tile: int) -> None:
    model, x = residual(), torch.randn(shape)
    network = converted(model, policy("store: exact", tile=tile))
    for _ in range(2):
        (expected, plain), (y, found) = gradients(model, x), gradients(network, x)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("again", [False, True], ids=["alone", "in blocks that run again"])
def test_the_hidden_layer_is_never_whole(again: bool) -> None:
    rows = 16, 128
    blocks = "    by_name: blocks.*\n    store: recompute\n\n" if again else ""
    text = f"on module:\n{blocks}    by_name: blocks.*.mlp\n    store: exact\n    tile: 8\n"
    network = mt.convert(residual(), Policy.parse(text), seed=0)
    optimizer = torch.optim.SGD(network.parameters())
    step = measure_step(network, torch.randn(*rows, WIDTH), lambda f, x: f(x).square().mean(), optimizer)
    assert step.peak_bytes - step.static_bytes - step.saved_bytes < 16 * 128 * HIDDEN * 4


def test_packed_slices_round_differently() -> None:
    """Linear layers have no bias. Of equal rows, only the mean error matters."""
    model = residual(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)))
    x = torch.randn(WIDTH).expand(8, 64, WIDTH)
    _, exact = gradients(model, x)

    def error(tile: int) -> tuple[float, float]:
        network = converted(model, policy("store: recompute", "level: 4", tile=tile))
        found = torch.stack([gradients(network, x)[1] for _ in range(64)])
        squares = (found - exact).square().sum(1).mean()
        return float(squares), float((found.mean(0) - exact).square().sum() / squares)

    (sliced, bias), (whole, _) = error(8), error(1)
    assert 0.5 * whole < sliced < 2 * whole  # 8 times as much if all slices had the same noise
    assert 0 < bias < 3 / 64


def test_dropout_is_drawn_again_as_it_was() -> None:
    network = converted(residual(perceptron(dropout=0.5)), policy("store: exact"))
    x = torch.randn(8, 16, WIDTH)
    torch.manual_seed(3)
    y, found = gradients(network, x)
    weights = [weight.detach().clone() for weight in network.parameters()]
    step = 1e-3
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(1 + step)
    torch.manual_seed(3)
    moved, _ = gradients(network, x)
    change = (moved.square().sum() - y.square().sum()) / step
    slope = torch.dot(found[: -x.numel()], torch.cat([each.flatten() for each in weights]))
    assert change == pytest.approx(float(slope), rel=0.05)


def less_mean(x: Tensor) -> Tensor:
    """Rows less the mean of all rows."""
    return x - x.flatten(0, -2).mean(0)


def shifted(x: Tensor) -> Tensor:
    """Each token plus the one before: samples are independent, tokens are not."""
    return F.gelu(x + F.pad(x, (0, 0, 1, 0))[:, :-1])


def count(x: Tensor, calls: Counter[str]) -> Tensor:
    """Its calls are counted in an object of its caller."""
    calls["inner"] += 1
    return F.gelu(x)


def positioned(x: Tensor, positions: Tensor) -> Tensor:
    """Tokens plus numbers of `(tokens,)`, of which there are as many as samples."""
    return F.gelu(x + positions[:, None])


def with_other(inner: nn.Module, other: Any) -> nn.Module:
    """Call an `inner` module with another argument."""
    return Composed(lambda m, x: m.inner(x, x.detach() if other is None else other), inner=inner)


class BatchNorm(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(0, -2)).view(input.shape)


@pytest.mark.parametrize(
    ("mlp", "names", "shape", "why"),
    [
        (Calling(less_mean), "blocks.0.mlp", (8, 6, WIDTH), "act on each row"),
        (Calling(shifted), "blocks.0.mlp", (2, 16, WIDTH), "act on each row"),
        (BatchNorm(WIDTH), "blocks.0.mlp", (8, 6, WIDTH), "act on each row"),
        (with_other(Calling(count), Counter()), "blocks.0.mlp.inner", (8, 6, WIDTH), "share its Counter"),
        (
            with_other(Calling(positioned), torch.arange(8.0)),
            "blocks.0.mlp.inner",
            (8, 8, WIDTH),
            "act on each row",
        ),
    ],
    ids=["mean", "shift", "batch norm", "an object", "positions"],
)
def test_what_cannot_be_cut_runs_again(mlp: nn.Module, names: str, shape: tuple[int, ...], why: str) -> None:
    model, x = residual(mlp), torch.randn(shape)
    network = converted(model, policy("store: exact", names=names))
    notice._given.clear()
    with pytest.warns(UserWarning, match=rf"`tile` of '{names}' has no effect: .*{why}"):
        y, found = gradients(network, x)
    expected, plain = gradients(model, x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


def test_samples_are_cut_where_tokens_depend_on_each_other() -> None:
    model, x = residual(Calling(shifted)), torch.randn(8, 16, WIDTH)
    network = converted(model, policy("store: exact"))
    torch.testing.assert_close(gradients(network, x), gradients(model, x))


def test_tensors_of_samples_are_cut_with_the_input() -> None:
    model, x = residual(with_other(nn.Bilinear(WIDTH, WIDTH, WIDTH), None)), torch.randn(8, 6, WIDTH)
    network = converted(model, policy("store: exact", names="*.inner"))
    torch.testing.assert_close(gradients(network, x), gradients(model, x), rtol=1e-4, atol=1e-4)
    assert has_slices(network.blocks[0].mlp.inner)


def test_the_check_changes_neither_random_numbers_nor_modes() -> None:
    network = converted(residual(perceptron(dropout=0.5)), policy("store: exact"))
    network.blocks[0].norm.eval()
    modes, x = [module.training for module in network.modules()], torch.randn(8, 16, WIDTH)
    outputs = []
    for _ in range(2):  # with the check, and without
        torch.manual_seed(5)
        outputs.append(network(x))
    assert torch.equal(*outputs)
    assert [module.training for module in network.modules()] == modes


def test_with_a_checkpoint_around_and_under_autocast() -> None:
    model, x = residual(), torch.randn(8, 48, WIDTH)
    network = converted(model, policy("store: exact"))

    def step(f: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(f, x.clone().requires_grad_(), use_reentrant=False)
        found = torch.autograd.grad(y.float().square().sum(), list(f.parameters()))
        return torch.cat([each.flatten() for each in found])

    expected = step(model)
    assert (step(network) - expected).norm() < 0.01 * expected.norm()


MODELS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "llama": (transformers.LlamaForCausalLM, llama_config(32), ("*.mlp", "*.self_attn")),
    "gpt2": (transformers.GPT2LMHeadModel, gpt2_config(32), ("*.mlp", "*.attn")),
    "bert": (transformers.BertForMaskedLM, bert_config(32), ("*.attention", "*.intermediate")),
    "t5": (transformers.T5ForConditionalGeneration, t5_config(32), ("*Attention", "*.DenseReluDense")),
}


@pytest.mark.parametrize(
    ("name", "padded"),
    [("llama", False), ("llama", True), ("gpt2", True), ("bert", True), ("t5", False), ("t5", True)],
)
def test_parts_of_transformers_models(name: str, padded: bool) -> None:
    """With masks of samples, positions that all share, results in tuples, and position biases that learn."""
    kind, config, names = MODELS[name]
    model = kind(config).train(mode=False)
    ids = torch.randint(1, 64, (4, 24))
    lengths = torch.tensor([24, 20, 16, 3] if padded else [24] * 4)
    mask = (torch.arange(24) < lengths[:, None]).long()
    found = [name for name, _ in model.named_modules() if any(fnmatchcase(name, glob) for glob in names)]
    assert len(found) >= 4
    network = converted(model, policy("store: exact", names=", ".join(names)))
    grads = []
    for each in (model, network):
        each.zero_grad()
        each(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None]))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)
    assert all(has_slices(network.get_submodule(name)) for name in found)
