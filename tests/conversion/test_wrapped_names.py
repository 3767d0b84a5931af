"""Wrappers count neither in the names of layers nor in the fingerprint: FSDP2, PEFT, `torch.compile`, DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import mesa_tune as mt
from mesa_tune.conversion.layers import Catalog, named_layers
from tests.builders import ViT, cross_entropy, gradients
from tests.conformance.running import relative_error

TOKENS = torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sharded(model: ViT) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def checkpointed(model: ViT) -> ViT:
    for place, block in enumerate(model.blocks):
        model.blocks[place] = checkpoint_wrapper(block)
    return model


def in_peft(model: ViT) -> Any:
    """A PEFT model whose adapters are taken away: what is left are the wrappers."""
    wrapped: Any = peft.get_peft_model(model, peft.LoraConfig(target_modules=["head"], r=2))
    wrapped.base_model.unload()
    return wrapped.requires_grad_()


WRAPS: dict[str, Callable[[ViT], Any]] = {
    "FSDP2": sharded,
    "checkpointed": checkpointed,
    "PEFT": in_peft,
    "compiled": torch.compile,
    "DataParallel": nn.DataParallel,
    "DDP": DistributedDataParallel,
    "average": AveragedModel,
    "checkpointed, FSDP2": lambda model: sharded(checkpointed(model)),
    "PEFT, DDP, compiled": lambda model: torch.compile(DistributedDataParallel(in_peft(model))),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_names_indices_and_policies(wrap: str) -> None:
    plain, wrapped = ViT(depth=1), WRAPS[wrap](ViT(depth=1))
    assert {name for name, _ in named_layers(wrapped)} == {name for name, _ in named_layers(plain)}
    assert Catalog.of(wrapped).layers() == Catalog.of(plain).layers()
    assert Catalog.of(wrapped).fingerprint == Catalog.of(plain).fingerprint
    text = "# mesa-tune policy 1\n# model ViT (layers {})\non fc:\n    by_name: blocks.0.fc1\n    level: 4\n"
    policy = mt.Policy.parse(text.format(Catalog.of(plain).fingerprint))
    assert policy.header.fingerprint is not None
    for used in (plain, wrapped):
        mt.convert(used, policy)
        mt.revert(used)
    with pytest.raises(mt.PolicyError, match="another model"):
        mt.convert(nn.Sequential(wrapped), policy)


def test_a_class_of_ones_own_with_two_bases_has_its_name() -> None:
    class Mixed(nn.Linear, nn.Identity):
        pass

    fingerprints = {Catalog.of(nn.Sequential(kind(4, 4))).fingerprint for kind in (nn.Linear, Mixed)}
    assert len(fingerprints) == 2


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Any] = {**gradients(model, TOKENS)}
    return {key: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for key, grad in found.items()}


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_fsdp2_trains_converted_before_and_after(first: bool) -> None:
    plain = ViT(depth=1)
    right = whole_gradients(plain)
    model = copy.deepcopy(plain)
    if not first:
        sharded(model)
    mt.convert(model, mt.Policy.uniform(level=16), seed=1, min_elements=0)
    if first:
        sharded(model)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    assert 1e-4 < relative_error(whole_gradients(model), right) < 0.1
    mt.revert(model)
    assert relative_error(whole_gradients(model), right) < 1e-12


def test_a_sharded_model_is_not_monitored() -> None:
    with pytest.raises(mt.RunError, match="the parameters are sharded"):
        mt.Monitor(sharded(ViT(depth=1)), cross_entropy)
