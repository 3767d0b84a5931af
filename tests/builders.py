"""Models, batches, losses and workloads that several test files use: each small, and built in one call."""

from __future__ import annotations

import copy
import importlib
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mesa_tune as mt
from mesa_tune.codecs import Spec
from mesa_tune.conversion.conversion import Conversion
from mesa_tune.conversion.model import conversion_of
from mesa_tune.measure.errors.joint_error import JointError
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.own_noise import Pair

Value = TypeVar("Value")
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}


def workload(
    model: Callable[[], nn.Module] | None = None,
    batch: Callable[[int], Any] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    batch_size: int = 8,
    **options: Any,
) -> mt.Workload:
    """A workload on the CPU: a ViT that classifies 24 tokens, except for what is given."""
    made = (model or ViT, batch or images, loss or cross_entropy)
    return mt.Workload(*made, batch_size=batch_size, **{"device": "cpu", **options})


def of_benchmarks(name: str) -> Any:
    """A module of the benchmarks, which are no package."""
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def language_workload() -> mt.Workload:
    """`LanguageModel` on random words."""
    return workload(LanguageModel, lambda n: torch.randint(2000, (n, 64)), next_word, batch_size=4)


def images(count: int) -> tuple[Tensor, Tensor]:
    """Tokens for a ViT, and labels of ten classes."""
    return torch.randn(count, 24, 16), torch.randint(10, (count,))


def words(count: int, length: int = 64, vocabulary: int = 128) -> dict[str, Tensor]:
    """Token ids for a language model of transformers, with labels."""
    ids = torch.randint(1, vocabulary, (count, length))
    return {"input_ids": ids, "labels": ids.clone()}


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of logits and labels."""
    return F.cross_entropy(model(batch[0]), batch[1])


def mean(model: nn.Module, x: Tensor) -> Any:
    """Mean output."""
    return model(x).mean()


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The loss that a model of transformers computes itself."""
    return model(**batch).loss


def spec(**settings: Any) -> Spec:
    """How layers of these settings store, without further context."""
    made = Spec.of(LayerSettings.from_dict(settings), 0)
    assert made is not None
    return made


def policy_of(rules: str) -> mt.Policy:
    """The policy of some rules."""
    return mt.Policy.parse("# mesa-tune policy 1\n" + rules)


def conversion(model: nn.Module) -> Conversion:
    """The conversion of a model that has one."""
    found = conversion_of(model)
    assert found is not None
    return found


def known(value: Value | None) -> Value:
    """The value, which is not None."""
    assert value is not None
    return value


def mean_error(joint: JointError, policy: mt.Policy, pairs: Sequence[Pair]) -> float:
    """The mean gradient error of a policy over pairs of a batch's draw and a rounding seed."""
    return statistics.fmean(error.error for error in joint.errors(policy, pairs))


@contextmanager
def no_trace(model: nn.Module) -> Iterator[None]:
    """Weights, buffers, gradients, modes and random states are the same afterwards, bit for bit."""

    def states() -> tuple[Any, ...]:
        states = torch.get_rng_state().tolist(), torch.initial_seed(), random.getstate()
        return *states, repr(np.random.get_state()), [module.training for module in model.modules()]

    tensors, others = copy.deepcopy(model.state_dict()), states()
    gradients = [(parameter.grad, copy.deepcopy(parameter.grad)) for parameter in model.parameters()]
    yield
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())
    for parameter, (gradient, values) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or (values is not None and torch.equal(gradient, values))
    assert states() == others


class Dispatched(TorchDispatchMode):
    """The arguments of each call of some operators of mesa_tune, in order."""

    def __init__(self, *names: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = [getattr(torch.ops.mesa_tune, name).default for name in names]
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.operators:
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


def encodings(run: Callable[..., Any], *args: Any) -> list[int]:
    """Elements of each tensor that a call encodes, in order."""
    with Dispatched("quantize", "quantize_map", "quantize_rows") as seen:
        run(*args)
    return [tensor.numel() for tensor, *_ in seen.calls]


def gradients(model: nn.Module, *args: Any, run: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
    """Gradients of the output's sum of squares by parameter; `run` is called in place of `model` if given."""
    model.zero_grad(set_to_none=True)
    (model if run is None else run)(*args).float().square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def descend(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], steps: int) -> list[float]:
    """Take steps down a loss; return its values."""
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


def next_word(model: nn.Module, ids: Tensor) -> Tensor:
    """Cross-entropy of each word with the logits of the one before."""
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gpt2(width: int = 64, layers: int = 2, **config: Any) -> transformers.GPT2LMHeadModel:
    """A GPT-2 of 128 words and 64 positions."""
    return transformers.GPT2LMHeadModel(gpt2_config(width, layers, **config))


def gpt2_config(width: int = 64, layers: int = 2, **config: Any) -> transformers.GPT2Config:
    """The configuration of `gpt2`."""
    sizes: dict[str, Any] = {"vocab_size": 128, "n_positions": 64, "n_head": 2, **ENDS}
    return transformers.GPT2Config(n_embd=width, n_layer=layers, **{**sizes, **config})


def llama(width: int = 64, layers: int = 2, **config: Any) -> transformers.LlamaForCausalLM:
    """A Llama of 128 words, with two heads for queries, and one for keys and values."""
    return transformers.LlamaForCausalLM(llama_config(width, layers, **config))


def llama_config(width: int = 64, layers: int = 2, **config: Any) -> transformers.LlamaConfig:
    """The configuration of `llama`."""
    sizes = {**_sizes(width, layers), "num_key_value_heads": 1, **ENDS}
    return transformers.LlamaConfig(**{**sizes, **config})


def bert_config(width: int = 64, layers: int = 2, **config: Any) -> transformers.BertConfig:
    """A BERT of 128 words."""
    return transformers.BertConfig(**{**_sizes(width, layers), **config})


def t5_config(width: int = 64, layers: int = 2, **config: Any) -> transformers.T5Config:
    """A T5 of 128 words."""
    sizes: dict[str, Any] = {"vocab_size": 128, "d_model": width, "d_kv": width // 2, "d_ff": 2 * width}
    made = transformers.T5Config(num_layers=layers, num_heads=2, **{**sizes, **config})
    made.update({"decoder_start_token_id": 0})
    return made


def _sizes(width: int, layers: int) -> dict[str, Any]:
    heads = {"num_hidden_layers": layers, "num_attention_heads": 2}
    return {"vocab_size": 128, "hidden_size": width, "intermediate_size": 2 * width, **heads}


class Block(nn.Module):
    """A transformer block whose q, k and v have one input."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.proj = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def _split(self, x: Tensor) -> Any:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attention(self, x: Tensor) -> Any:
        q, k, v = self._split(self.q(x)), self._split(self.k(x)), self._split(self.v(x))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """Tokens `(batch, tokens, 16)` to logits; the head can be left away by `get_features`."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.register_buffer("position", torch.randn(1, 1, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def get_features(self, x: Tensor) -> Any:
        h = self.embed(x) + self.position
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.get_features(x).mean(1))


class MLPBlock(nn.Module):
    """A norm, a perceptron and a residual connection, at any width."""

    def __init__(self, width: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 2 * width
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class BatchNormMLP(nn.Module):
    """Batch norm over tokens, dropout, and layers that are encoded: `(batch, tokens, 32)` to logits."""

    norm: nn.Module

    def __init__(self, tokens: int = 48) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.norm, self.drop = nn.BatchNorm1d(tokens), nn.Dropout(0.2)
        self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        x = F.gelu(self.drop(self.norm(self.first(x))))
        return self.head(F.gelu(self.second(x)).mean(1))


class LanguageModel(nn.Module):
    """Two perceptrons on words; the logits are large beside everything else."""

    def __init__(self, words: int = 2000, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([MLPBlock(width, 4 * width) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Calling(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Checkpointed(nn.Module):
    """A module under PyTorch's checkpoint, of either kind; plain for None."""

    def __init__(self, part: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x: Tensor) -> Any:
        if self.reentrant is None:
            return self.part(x)
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


class Functions(nn.Module):
    """No layer at all: parameters, and functions called directly; `product` takes the hooks."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(width, width) / 8)
        self.w2 = nn.Parameter(torch.randn(width, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(F.linear(x, self.w1))
        scores = h @ F.linear(h, self.w2).transpose(-2, -1)
        return F.gelu(F.softmax(scores, dim=-1) @ h)


def only_hooked(x: Tensor) -> Tensor:
    """A function without a formula, which saves a tensor like its input."""
    return torch.lerp(x, -x, x.detach())


class Product(nn.Module):
    """One activation moved towards another, twice: only hooks reach these."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        return torch.lerp(a, only_hooked(self.b(x)), a)


class Reused(nn.Module):
    """One linear layer used three times, and a second name for it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.again = self.first
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        return self.tied(self.again(F.gelu(self.first(F.gelu(self.first(x))))))


class Branching(nn.Module):
    """Takes one of two ways."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.left, self.right = Functions(width), Product(width)

    def forward(self, x: Tensor, go_left: bool = True) -> Any:
        return self.left(x) if go_left else self.right(x)


class Fixed(nn.Module):
    """Multiplies, by a matrix product and by elements, with what is no activation; of batches of 64 rows."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of
        self.scale = nn.Parameter(torch.ones(64))
        self.matrix = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("fixed", torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(64) + self.scale
        other = {
            "batch": x,
            "view of batch": x.t()[:, :64],
            "buffer": self.fixed,
            "detached": self.matrix.detach(),
            "view of detached": self.matrix.detach().t(),
            "parameter": self.matrix,
        }[self.of]
        assert isinstance(other, Tensor)
        return (h * other).sum() + (h @ other).sum()


def renamed(model: nn.Module) -> nn.Module:
    """The model with another class name on every module."""
    for number, module in enumerate(model.modules()):
        if type(module) is not nn.ModuleList:
            module.__class__ = type(f"Renamed{number}", (type(module),), {})
    return model
