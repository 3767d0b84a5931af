"""Every model of the zoo, tiny: exact forward, small gradient error, and nothing large left uncompressed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mesa_tune as mt
from tests.builders import Calling, of_benchmarks, workload

NAMES = (
    *("deit_s", "swin_t", "pvt_t", "resnet_50", "bert_base", "gpt2", "llama", "unet", "unet_residual"),
    *("t5_small", "convnext_t", "vit_mae", "segformer_b0", "mobilenet_v2"),
)
FOUR_BITS = mt.Policy.uniform(level=16)
# A tiny model's tensors of up to 4,096 elements, and statistics by row, weigh more than a published one's.
TINY_COVERED = 0.9


@pytest.fixture(scope="module", name="bench")
def _bench() -> Any:
    """The benchmarks' modules, which are no package."""
    names = ("zoo", "meters", "uncompressed", "exactness", "models_page")
    return type("Bench", (), {name: of_benchmarks(name) for name in names})


def tiny(bench: Any, name: str, **more: Any) -> Any:
    return bench.zoo.workload(name, 4, scale="tiny", **more)


def test_names_are_the_zoos(bench: Any) -> None:
    assert tuple(bench.zoo.ZOO) == NAMES


def zoo(*fast: str) -> pytest.MarkDecorator:
    """One case for each model; all but those named are a sweep."""
    sweep = pytest.mark.slow("sweep")
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in fast else sweep) for name in NAMES]
    )


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@zoo("resnet_50", "t5_small")
def test_forward_with_dropout_and_revert_are_plain(bench: Any, name: str, autocast: str | None) -> None:
    assert bench.exactness.differences(tiny(bench, name, dropout=0.1, autocast=autocast), FOUR_BITS) == []


@zoo("deit_s", "llama")
def test_gradient_error_is_small(bench: Any, name: str) -> None:
    policies = {"8": mt.Policy.uniform(level=256), "4": FOUR_BITS}
    found = bench.exactness.errors(tiny(bench, name), policies, seeds=3)
    assert 0 < found["8"]["mean"] < 1e-3
    assert 0 < found["4"]["mean"] < 0.1


@pytest.mark.parametrize("name", NAMES)
def test_nothing_large_is_left_uncompressed(bench: Any, name: str) -> None:
    work = tiny(bench, name)
    plain = bench.meters.storages_after_forward(work, None).bytes
    left = bench.uncompressed.left_uncompressed(work, FOUR_BITS)
    assert 1 - left.bytes / plain > TINY_COVERED, left.rows[:5]
    ours = bench.meters.storages_after_forward(work, FOUR_BITS).bytes
    assert abs(ours - left.coded_bytes - left.bytes) < 0.02 * plain


def test_autocasts_copies_of_weights_are_counted_once_and_apart(bench: Any) -> None:
    rows, width = 100, 64
    layers = (width, width, False)
    work = squares(lambda: nn.Sequential(nn.Linear(*layers), nn.Linear(*layers)), autocast="bfloat16")
    found = bench.meters.storages_after_forward(work, None)
    # The first layer's weight is not kept: its input wants no gradient.
    assert found.weight_copies == 2 * width * width
    # Both layers' inputs in half precision, and in single what is squared.
    assert found.bytes == (2 + 2 + 4) * 4 * rows * width


def after_linear(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), Calling(function))


def squares(model: Callable[[], nn.Module], **more: Any) -> mt.Workload:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean()  # type: ignore[no-any-return]

    return workload(model, lambda n: torch.randn(n, 100, 64), loss, batch_size=4, **more)


def test_a_forward_that_is_not_the_same_is_found(bench: Any) -> None:
    forwards = count(1)
    work = squares(lambda: after_linear(lambda h: h * next(forwards)))
    found = bench.exactness.differences(work, FOUR_BITS)
    assert found == ["outputs", "reverted outputs", "reverted gradients"]


def test_what_a_policy_leaves_exact_is_named_with_its_bytes(bench: Any) -> None:
    policy = mt.Policy.parse("on gelu:\n    by_index: all\n    enable: False\n")
    work = squares(lambda: after_linear(lambda h: F.gelu(h).cumprod(-1)))
    left = bench.uncompressed.left_uncompressed(work, policy)
    size = 4 * 100 * 64 * 4
    found = {(row.layers, row.function): row.bytes for row in left.rows}
    assert found["*.gelu.*", "gelu"] == size
    assert found["*.cumprod.*", "cumprod"] == 2 * size
    assert left.bytes >= 3 * size


def test_derived_pairs_are_named_with_their_producers(bench: Any) -> None:
    derive = mt.Policy.uniform(level=16, store="derive")
    left = bench.uncompressed.left_uncompressed(tiny(bench, "deit_s"), derive)
    pairs = {(pair.layers, pair.producers): pair.tensors for pair in left.derived}
    assert pairs["deit.layers.*.mlp.fc1", "deit.layers.*.layernorm_after"] == 2


def test_the_page_has_a_row_and_a_list_for_each_latest_result(bench: Any) -> None:
    def result(batch: int, autocast: str | None = None) -> dict[str, Any]:
        left = bench.uncompressed.Row("blocks.*.mul.*", "mul", 2_000_000, 12, (8, 99), "float32")
        return {
            "date": "2026-01-02T03:04:05",
            "hardware": {"cpu": "some CPU", "threads": 1},
            "versions": {"torch": "2.13.0"},
            "subject": "gpt2",
            "policy": "uniform 16",
            "autocast": autocast,
            "batch_size": batch,
            "plain": {"storages": 100_000_000},
            "share": {"storages": 0.1234, "resident": 0.1334},
            "under_codec": 0.98,
            "uncompressed_bytes": 2_000_000,
            "errors": {"uniform 16": {"mean": 0.0123}},
            "error_batch_size": 2,
            "differs": [],
            "left": [vars(left)],
        }

    row = "| GPT-2 | fp32 | uniform 16 | 8 | 100 | 14% | 12.3% | 13.3% | 98.00% | — | 1.2e-02 (2) | — | yes |"
    page = bench.models_page.page([result(4), result(8), result(8, "bfloat16")])
    assert row in page
    assert "| GPT-2 | fp32 | uniform 16 | 4 |" not in page
    assert page.count("| `blocks.*.mul.*` | mul | 12 of 8×99 float32 | 2.00 | 2.00% |") == 2
