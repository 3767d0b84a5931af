"""Estimates from fake tensors beside real steps: equal bytes, without the memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import mesa_tune as mt
from mesa_tune.errors import BudgetError, RunError, WorkloadError
from mesa_tune.estimation import _largest
from mesa_tune.measure.bytes_only import bytes_only_profile
from mesa_tune.measure.tracing import StepTracer
from mesa_tune.profiles.profile import Profile
from tests.builders import (
    ViT,
    bert_config,
    cross_entropy,
    gpt2,
    gpt2_config,
    llama_config,
    mean,
    own_loss,
    t5_config,
    words,
    workload,
)
from tests.step_memory import PLAIN, Composed, measured

hf: Any = transformers
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64
}  # fmt: skip
CONFIGS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gpt2": lambda: (hf.GPT2LMHeadModel, gpt2_config(32, 1)),
    "bert": lambda: (hf.BertForMaskedLM, bert_config(32, 1)),
    "vit": lambda: (hf.ViTForImageClassification, hf.ViTConfig(image_size=32, patch_size=8, **SIZES)),
    "swin": lambda: (
        hf.SwinForImageClassification,
        hf.SwinConfig(image_size=32, depths=[1], num_heads=[2], embed_dim=16, window_size=4),
    ),
    "resnet": lambda: (
        hf.ResNetForImageClassification,
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    ),
    "t5": lambda: (hf.T5ForConditionalGeneration, t5_config(32, 1)),
    "llama": lambda: (hf.LlamaForCausalLM, llama_config(32, 1)),
}
UNIFORM = mt.Policy.uniform(level=16)
ACCUMULATED = {"autocast": "bfloat16", "accumulation": 4}


def pictures(count: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 32, 32), "labels": torch.randint(2, (count,))}


def of_config(name: str, **step: Any) -> mt.Workload:
    model_class, config = CONFIGS[name]()
    batch = words if model_class.main_input_name == "input_ids" else pictures
    return workload(lambda: model_class(config), batch, own_loss, batch_size=4, **step)


def of_vit(**options: Any) -> mt.Workload:
    return workload(lambda: ViT(depth=1), **options)


@cache
def plain(device: str = "cpu") -> mt.Estimate:
    """The estimate of `of_vit()`."""
    return mt.estimate(of_vit(), device=device)


SWEEP = pytest.mark.slow("sweep")
STEPS = [
    ("gpt2", {}),
    ("resnet", ACCUMULATED),
    pytest.param("t5", {}, marks=SWEEP),
    pytest.param("llama", ACCUMULATED, marks=SWEEP),
    pytest.param("bert", ACCUMULATED, marks=SWEEP),
    pytest.param("vit", {}, marks=SWEEP),
    pytest.param("swin", {}, marks=SWEEP),
]


@pytest.mark.parametrize(("name", "step"), STEPS)
def test_estimates_are_the_bytes_of_real_steps(name: str, step: dict[str, Any]) -> None:
    work = of_config(name, **step)
    for policy in (None, UNIFORM):
        estimated, real = mt.estimate(work, policy), measured(work, policy or PLAIN)
        assert estimated.saved_bytes == real.saved_bytes
        assert estimated.peak_bytes == pytest.approx(real.peak_bytes, rel=0.003)
        assert estimated.frame()["bytes"].sum() == estimated.saved_bytes


@pytest.mark.parametrize("name", ["llama", pytest.param("resnet", marks=SWEEP)])
def test_the_profile_of_bytes_is_the_real_one_without_prices(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = of_config(name)
    # Of modules that run again it knows nothing: no search chooses among them.
    monkeypatch.setattr(StepTracer, "rerun_modules", lambda *_: ())
    fake, real = bytes_only_profile(work), mt.profile(work, options=[])
    assert replace(fake.timeline, slots=()) == replace(real.timeline, slots=())
    for slot, other in zip(fake.timeline.slots, real.timeline.slots, strict=True):
        assert (slot.layer, slot.phase) == (other.layer, other.phase)
        assert slot.once.gradients == other.once.gradients
        exact, packed, derived, *others = slot.once.live
        assert (exact, packed, derived) == other.once.live[:3]
        assert set(others) == {packed}  # of other codecs no step is traced
    assert (fake.saved_bytes, fake.peak_bytes) == (real.saved_bytes, real.peak_bytes)
    assert fake.exact == real.exact
    assert fake.step_ms is None
    assert not any(layer.options for layer in fake.layers)
    for policy in (UNIFORM, mt.Policy.uniform(level=16, store="derive")):
        for size in real.timeline.batch_sizes:
            predicted = fake.predict(policy, batch_size=size)
            assert predicted == replace(real.predict(policy, batch_size=size), step_ms=None)
    fake.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == fake


def test_search_says_that_bytes_have_no_prices() -> None:
    with pytest.raises(RunError, match="bytes only and no prices"):
        mt.search_policy(bytes_only_profile(of_vit()), "50%")


def test_an_instance_is_estimated_and_stays_as_it_is() -> None:
    work = of_vit()
    model, batch = work.build(), work.make_batch()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    estimated = mt.estimate(model, batch, cross_entropy, optimizer=optimizer)
    assert estimated.saved_bytes == plain().saved_bytes
    assert estimated.peak_bytes < plain().peak_bytes  # one state per weight, not two
    twice = mt.estimate(model, batch, cross_entropy, batch_size=16, optimizer=optimizer)
    assert twice.saved_bytes == mt.estimate(work, batch_size=16).saved_bytes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(type(parameter) is nn.Parameter and parameter.grad is None for parameter in model.parameters())


def test_an_instance_is_estimated_with_what_a_training_script_has() -> None:
    torch.manual_seed(0)
    model, (x, y) = ViT(depth=1), of_vit(batch_size=20).make_batch()
    samples: Any = list(zip(x, y, strict=True))
    loader = torch.utils.data.DataLoader(samples, batch_size=8)  # the last batch has four samples
    state = torch.get_rng_state()
    parameters: Any = [{"params": model.blocks.parameters(), "lr": 0.1}, {"params": model.head.parameters()}]
    estimated = mt.estimate(model, loader, cross_entropy, optimizer=torch.optim.AdamW(parameters))
    assert torch.equal(torch.get_rng_state(), state)
    whole = plain()
    assert estimated.saved_bytes == whole.saved_bytes
    others = sum(each.nbytes for part in (model.embed, model.norm) for each in part.parameters())
    # No moments and steps of these, but their gradients, which no optimizer frees.
    assert whole.static_bytes - estimated.static_bytes == 2 * others + 4 * 4 - others


def test_a_model_on_the_meta_device_needs_no_memory() -> None:
    with torch.device("meta"):
        model = ViT(depth=1)
    estimated = mt.estimate(model, of_vit().make_batch(), cross_entropy)
    assert estimated.saved_bytes == plain().saved_bytes


def test_a_model_that_fits_no_machine_is_estimated() -> None:
    config = hf.LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=1, vocab_size=128000)
    work = workload(lambda: hf.LlamaForCausalLM(config), words, own_loss, batch_size=64)
    assert mt.estimate(work).static_bytes > 3 * 4 * 2 * 128000 * 8192


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    before = torch.get_rng_state()
    estimated = mt.estimate(of_vit())
    assert torch.equal(before, torch.get_rng_state())
    limit = 2 * estimated.needed_bytes
    size = estimated.largest_batch(limit)
    assert mt.estimate(of_vit(batch_size=size)).fits(limit)
    assert not mt.estimate(of_vit(batch_size=size + 1)).fits(limit)
    assert estimated.largest_batch("1kB") == 0
    assert estimated.fits(estimated.needed_bytes)
    assert not estimated.fits(estimated.needed_bytes - 1)


def test_the_largest_batch_is_found_in_few_steps_where_bytes_grow_evenly() -> None:
    sizes: list[int] = []

    def needed(size: int) -> int:
        sizes.append(size)
        return 1000 + 7 * size

    assert _largest(needed, 70_000, start=20_000) == (70_000 - 1000) // 7
    assert len(sizes) <= 5  # 17 by halves


def test_limits_are_amounts() -> None:
    limits: list[tuple[Any, str]] = [("40%", "not a share"), ("much", "not an amount"), ("24", "in bytes")]
    for limit, what in [*limits, (0.6, "in bytes")]:
        with pytest.raises(BudgetError, match=what):
            plain().fits(limit)


def of_the_sign(model: nn.Module, x: Tensor) -> Any:
    y = model(x).mean()
    return y.square() if y > 0 else y


def of_some_rows(model: nn.Module, x: Tensor) -> Any:
    return mean(model, x[x.sum(1).nonzero().squeeze(1)])


@pytest.mark.parametrize("loss", [of_the_sign, of_some_rows])
def test_a_step_that_depends_on_values_is_an_error_with_its_line(loss: Any) -> None:
    work = workload(lambda: nn.Linear(8, 8), lambda n: torch.randn(n, 8), loss)
    with pytest.raises(WorkloadError, match=r"test_estimation\.py:\d+: loss\(\).*\n.*\n.*real steps"):
        mt.estimate(work)


def test_models_that_read_values_while_they_are_built_are_fine() -> None:
    def model() -> nn.Module:
        rates = torch.linspace(0, 0.5, 3).tolist()
        large = nn.Linear(512, 512)
        nn.init.trunc_normal_(large.weight, std=0.02)
        return nn.Sequential(large, nn.Dropout(rates[1]), nn.Linear(512, 1))

    def batch(count: int) -> Tensor:
        return torch.randn(count, 512)[:, torch.randperm(512)]

    work = workload(model, batch, mean)
    assert mt.estimate(work).saved_bytes == measured(work, PLAIN).saved_bytes


def test_a_model_with_tied_weights_may_change_its_dtype_while_it_is_built() -> None:
    def model() -> nn.Module:
        return gpt2(256, 1, vocab_size=512).bfloat16()  # the embedding has so many elements that it is fake

    work = workload(model, words, own_loss, batch_size=4)
    estimated, real = mt.estimate(work, UNIFORM), measured(work, UNIFORM)
    assert (estimated.saved_bytes, estimated.peak_bytes) == (real.saved_bytes, real.peak_bytes)


def saved_dtypes(profile: Profile) -> dict[str, set[str]]:
    saved: dict[str, set[str]] = {}
    for tensor in profile.tensors:
        saved.setdefault(tensor.owner, set()).add(tensor.dtype)
    return saved


def attending(model: Any, x: Tensor) -> Tensor:
    q, k, v = model.fc(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(2)
    return F.dropout(model.norm(y), 0.1)


def of_attention(**step: Any) -> mt.Workload:
    return workload(
        lambda: Composed(attending, fc=nn.Linear(32, 96), norm=nn.LayerNorm(32)),
        lambda n: torch.randn(n, 64, 32),
        lambda m, x: m(x).float().sum(),
        batch_size=4,
        **step,
    )


def test_cuda_saves_what_its_kernels_save() -> None:
    tokens, heads, length = 4 * 64, 2, 64
    cpu, cuda = (bytes_only_profile(of_attention(), cuda=flag) for flag in (False, True))
    scores = 4 * heads * length * length
    assert max(tensor.bytes for tensor in cpu.tensors) == 4 * scores  # the CPU writes dropout's softmax out
    assert max(tensor.bytes for tensor in cuda.tensors) == 4 * tokens * 96
    dropped = next(tensor for tensor in cuda.tensors if tensor.owner.startswith("dropout"))
    assert (dropped.dtype, dropped.bytes) == ("bool", tokens * 32)
    sums = [tensor.bytes for tensor in cuda.tensors if tensor.shape == (4, heads, length)]
    assert sums == [4 * tokens * heads]
    assert cuda.device == "cuda"
    assert "few GPUs have checked" in cuda.notes[0]


def test_autocast_on_cuda_normalizes_in_float32() -> None:
    work = of_attention(autocast="bfloat16")
    cpu, cuda = (saved_dtypes(bytes_only_profile(work, cuda=flag)) for flag in (False, True))
    assert "bfloat16" in cpu["norm"]
    assert cuda["norm"] == {"float32"}


def test_autocast_for_cuda_inside_the_loss_counts_on_cuda() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return cross_entropy(model, batch)

    inside = of_vit(loss=loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = mt.estimate(inside, device="cuda")
    around = mt.estimate(of_vit(autocast="bfloat16"), device="cuda")
    assert own.saved_bytes == around.saved_bytes < plain("cuda").saved_bytes
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert mt.estimate(inside).saved_bytes == plain().saved_bytes


def test_cuda_is_unverified_and_reserves_more_than_the_peak() -> None:
    estimated = plain("cuda")
    assert not estimated.verified
    assert estimated.margin >= 0.1
    assert estimated.reserved_bytes >= estimated.peak_bytes > plain().static_bytes
    assert estimated.needed_bytes > 1.1 * estimated.reserved_bytes
    assert plain().verified


def test_an_unknown_device_is_an_error_and_a_file_is_not_a_workload() -> None:
    for device, message in {"tpu": "must be cpu, cuda or cuda:N", "mps": "not on MPS"}.items():
        with pytest.raises(WorkloadError, match=message):
            mt.estimate(of_vit(), device=device)
    with pytest.raises(WorkloadError, match=r"'hf:config\.json': is neither a Workload"):
        mt.estimate("hf:config.json")  # type: ignore[call-overload]


def test_on_cuda_a_policy_holds_from_the_first_step() -> None:
    work = workload()  # of one block, what is saved is too little of the peak
    before, four = (mt.estimate(work, policy, device="cuda") for policy in (None, UNIFORM))
    saved = mt.estimate(work, UNIFORM).saved_bytes
    assert four.peak_bytes < before.peak_bytes - 0.5 * (before.saved_bytes - saved)


def test_an_lstm_is_estimated_too_low_with_a_warning() -> None:
    work = workload(
        lambda: nn.ModuleDict({"lstm": nn.LSTM(32, 32)}),
        lambda count: torch.randn(16, count, 32),
        lambda model, x: model["lstm"](x)[0].mean(),
    )
    with pytest.warns(UserWarning, match="'lstm' are estimated too low"):
        mt.estimate(work)


@pytest.mark.parametrize(("name", "packed"), [pytest.param("gpt2", False, marks=SWEEP), ("llama", True)])
def test_a_mask_for_packed_texts_is_made_where_a_real_step_makes_it(name: str, packed: bool) -> None:
    """Without a cache, transformers asks the values of positions whether texts are packed into a row."""

    def batch(count: int) -> dict[str, Tensor]:
        positions = {"position_ids": torch.arange(32).repeat(count, 2)} if packed else {}
        return words(count) | positions

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return own_loss(model, {**batch, "use_cache": False})  # type: ignore[dict-item]

    work = replace(of_config(name), batch=batch, loss=loss)
    for policy in (None, UNIFORM):
        estimated, real = mt.estimate(work, policy), measured(work, policy or PLAIN)
        assert estimated.saved_bytes == real.saved_bytes
        assert estimated.peak_bytes == pytest.approx(real.peak_bytes, rel=0.003)


def test_a_model_that_copies_its_layers_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)  # a weight of 2¹⁷ elements is fake
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    work = workload(encoder, lambda n: torch.rand(n, 16, 256), mean, batch_size=2)
    torch.set_warn_always(True)
    try:
        mt.estimate(work)
    finally:
        torch.set_warn_always(False)
    assert not [str(warning.message) for warning in recwarn]
