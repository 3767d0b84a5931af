"""One process of two that share each layer of a small Llama, by the plan of torchtitan's:

    python -m tests.steps.tensor_parallel RANK FOLDER

Saves, for every way to convert and wrap it, what a step's whole gradient is and what its forward saves.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import mesa_tune as mt
from mesa_tune.measure.memory.meter import Meter
from tests import process_group
from tests.process_group import WORLD

WIDTH, HEADS, WORDS, LENGTH, SAMPLES, SEEDS = 64, 4, 96, 64, 4, 4
AGAIN = "# mesa-tune policy 1\non module:\n    by_name: layers.*.feed_forward\n    store: recompute\n"
POLICIES = {
    "8 bits": mt.Policy.uniform(level=256),
    "4 bits": mt.Policy.uniform(level=16),
    "derive": mt.Policy.uniform(level=256, store="derive"),
    "recompute": mt.Policy.parse(AGAIN),
    "tile": mt.Policy.parse(AGAIN + "    tile: 2\n"),
}
ORDERS = ("convert first", "parallelize first")
WRAPS = ("alone", "FSDP2")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.ffn_norm, self.feed_forward = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def model() -> Llama:
    torch.manual_seed(0)
    return Llama()


def parallelize(llama: Llama, mesh: DeviceMesh) -> None:
    """Shard each layer's weights over the processes, the sequence between them."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(llama, mesh, ends)
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    plan: dict[str, Any] = {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    plan |= {"attention": whole, "feed_forward": whole, "attention.wo": rows, "feed_forward.w2": rows}
    plan |= dict.fromkeys(["attention.wq", "attention.wk", "attention.wv"], columns)
    plan |= dict.fromkeys(["feed_forward.w1", "feed_forward.w3"], columns)
    for layer in llama.layers:
        parallelize_module(layer, mesh, plan)


def batch() -> Tensor:
    return torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def loss(llama: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(llama(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def made(policy: mt.Policy | None, order: str, wrap: str, mesh: DeviceMesh) -> Llama:
    """The model, converted before it is parallelized or after it is wrapped."""
    llama = model()
    if policy is not None and order == "convert first":
        mt.convert(llama, policy, seed=0, min_elements=0)
    parallelize(llama, mesh["tp"])
    if wrap == "FSDP2":
        for layer in llama.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(llama, mesh=mesh["dp"])
    if policy is not None and order == "parallelize first":
        mt.convert(llama, policy, seed=0, min_elements=0)
    return llama


def steps(llama: nn.Module, policy: mt.Policy | None) -> tuple[list[dict[str, Tensor]], int]:
    """The whole gradients of steps that round by different seeds, and the bytes that the last one saves."""
    found, saved, ids = [], 0, batch()
    with Meter() as meter:
        for _ in range(SEEDS):
            llama.zero_grad()
            gc.collect()
            mark = meter.mark()
            with loss_parallel():
                if policy is None:
                    value = loss(llama, ids)
                else:
                    with mt.compress_saved(policy, seed=0):
                        value = loss(llama, ids)
                saved = meter.live_since(mark, without=[value])
                value.backward()
            del value
            found.append({name: whole(weight.grad) for name, weight in llama.named_parameters()})
    return found, saved


def whole(grad: Tensor | None) -> Tensor:
    """The gradient of all shards."""
    assert grad is not None
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()


def found(*_: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
    results: dict[str, Any] = {wrap: steps(made(None, "", wrap, mesh), None) for wrap in WRAPS}
    for name, policy in POLICIES.items():
        for order in ORDERS:
            for wrap in WRAPS:
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    gradients, saved = steps(made(policy, order, wrap, mesh), policy)
                results[f"{name}, {order}, {wrap}"] = gradients, saved, [str(each.message) for each in said]
    return results


if __name__ == "__main__":
    process_group.join(found)
