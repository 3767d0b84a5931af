"""Modules whose forward somebody wraps, unwraps or copies: Accelerate, `nn.DataParallel`, EMA copies."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mesa_tune as mt
from mesa_tune.conversion.model import conversion_of
from tests.builders import conversion, gradients
from tests.conformance.running import relative_error

X = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
POLICY = mt.Policy.uniform(level=4)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def error(model: nn.Module, right: dict[str, Tensor]) -> float:
    return relative_error(gradients(model, X), right)


def convert(model: nn.Module) -> nn.Module:
    return mt.convert(model, POLICY, seed=1, min_elements=0)


@pytest.fixture(name="accelerator", scope="module")
def _accelerator() -> Accelerator:
    return Accelerator(mixed_precision="bf16", cpu=True)


ORDERS = (
    *("convert, prepare", "prepare, convert", "convert, prepare, convert"),
    "convert, prepare, revert, convert",
)


def made(accelerator: Accelerator, order: str) -> nn.Module:
    model = network()
    for step in order.split(", "):
        {"convert": convert, "prepare": accelerator.prepare, "revert": mt.revert}[step](model)
    return model


def unwrapped(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    return accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("order", ORDERS)
def test_accelerate_in_bf16(accelerator: Accelerator, order: str) -> None:
    right = gradients(accelerator.prepare(network()), X)
    model = made(accelerator, order)
    assert model(X).dtype == torch.float32
    assert torch.equal(model(X), accelerator.prepare(network())(X))
    assert 1e-3 < error(model, right) < 0.1
    assert list(inspect.signature(model.forward).parameters) == ["input"]


@pytest.mark.parametrize("order", ORDERS)
def test_a_prepared_model_is_unwrapped(accelerator: Accelerator, order: str) -> None:
    plain = network()
    right = gradients(plain, X)
    model = unwrapped(accelerator, made(accelerator, order))
    assert list(inspect.signature(model.forward).parameters) == ["input"]
    assert torch.equal(model(X), plain(X))
    assert 1e-3 < error(model, right) < 0.1
    assert conversion_of(model) is not None


@pytest.mark.parametrize("unwrap", [False, True], ids=["prepared", "unwrapped"])
@pytest.mark.parametrize("order", ORDERS)
def test_revert_reverts_all_of_it(accelerator: Accelerator, order: str, unwrap: bool) -> None:
    model, plain = made(accelerator, order), accelerator.prepare(network())
    if unwrap:
        model, plain = unwrapped(accelerator, model), network()
    if unwrap is bool(ORDERS.index(order) % 2):
        model(X)
    assert mt.revert(model) is model
    assert conversion_of(model) is None
    assert torch.equal(model(X), plain(X))
    assert error(model, gradients(plain, X)) == 0
    assert unwrapped(accelerator, model)(X).dtype == torch.float32
    assert error(unwrapped(accelerator, model), gradients(network(), X)) == 0


@pytest.mark.parametrize("unwrap", [False, True], ids=["prepared", "unwrapped"])
@pytest.mark.parametrize("order", ORDERS[:2])
def test_a_copy_of_a_prepared_model_is_its_own(accelerator: Accelerator, order: str, unwrap: bool) -> None:
    model = made(accelerator, order)
    if unwrap:
        model = unwrapped(accelerator, model)
    other = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert float(model(X).abs().sum()) == 0
    assert torch.equal(other(X), (network() if unwrap else accelerator.prepare(network()))(X))
    assert 1e-3 < error(other, gradients(network(), X)) < 0.1
    assert conversion_of(other) is not conversion_of(model)


def test_an_unwrapped_model_is_pickled_after_a_call(accelerator: Accelerator) -> None:
    model = unwrapped(accelerator, made(accelerator, "convert, prepare"))
    with pytest.raises(AttributeError, match=r"call it once first, or mt\.revert"):
        pickle.dumps(model)
    model(X)
    assert 1e-3 < error(pickle.loads(pickle.dumps(model)), gradients(network(), X)) < 0.1


def _activated_twice(model: nn.Sequential, x: Tensor) -> Tensor:
    return F.gelu(model[0](F.gelu(model[2](x))))


def test_a_forward_that_was_replaced_is_converted_again() -> None:
    model, plain = network(), network()
    for each in (model, plain):
        if each is model:
            convert(each)
        each.forward = partial(_activated_twice, each)  # type: ignore[method-assign]
    convert(model)
    model(X)
    assert "gelu.0" in conversion(model).specs
    assert 1e-3 < error(model, gradients(plain, X)) < 0.1
    assert error(mt.revert(model), gradients(plain, X)) == 0


def test_a_forward_that_was_wrapped_in_a_closure_is_reverted() -> None:
    model = convert(network())
    inner = model.forward
    model.forward = lambda x: inner(x) * 2
    plain = network()
    right = {name: 4 * grad for name, grad in gradients(plain, X).items()}
    assert 1e-3 < error(model, right) < 0.1
    assert error(mt.revert(model), right) < 1e-12
    assert 1e-3 < error(convert(model), right) < 0.1


def test_a_forward_that_was_wrapped_before_stays_wrapped_when_it_is_bound_again() -> None:
    model: Any = network()
    inner = model.forward

    @functools.wraps(inner)
    def doubled(x: Tensor) -> Any:
        return inner(x) * 2

    model.forward = doubled
    convert(model)
    method: Any = model.forward
    model.forward = MethodType(method.__func__, model)
    assert torch.equal(model(X), network()(X) * 2)
    assert torch.equal(mt.revert(model)(X), network()(X) * 2)


def test_replicas_of_data_parallel_are_refused() -> None:
    model = convert(network())
    for module in model.modules():
        with pytest.raises(mt.RunError, match="DistributedDataParallel"):
            module._replicate_for_data_parallel()
    mt.revert(model)
    for module in model.modules():
        assert "forward" not in module._replicate_for_data_parallel().__dict__


def test_one_device_needs_no_replicas() -> None:
    model = convert(nn.DataParallel(network()))
    assert 1e-3 < error(model, gradients(nn.DataParallel(network()), X)) < 0.1


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_averaged_models(first: bool) -> None:
    model = network()
    if first:
        convert(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    if not first:
        convert(model)
        convert(average)
    average.update_parameters(model)
    assert set(average.state_dict()) == {"n_averaged", *(f"module.{name}" for name in network().state_dict())}
    assert torch.equal(average(X), network()(X))
    right = {f"module.{name}": grad for name, grad in gradients(network(), X).items()}
    assert 1e-3 < error(average, right) < 0.1
    for parameter in model.parameters():
        parameter.data.zero_()
    average.update_parameters(model)
    halved = network().state_dict()["0.weight"] / 2
    assert torch.equal(average.state_dict()["module.0.weight"], halved)
