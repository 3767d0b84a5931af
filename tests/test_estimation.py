"""Estimates from fake tensors beside real steps: equal bytes, without the memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import mesa_tune as mt
from mesa_tune.errors import BudgetError, RunError, WorkloadError
from mesa_tune.profiler.bytes_only import bytes_only_profile
from mesa_tune.profiler.memory.meter import StepMemory, measure_step
from mesa_tune.profiler.profile import Profile
from mesa_tune.profiler.tracing import StepTracer
from tests.builders import ViT

hf: Any = transformers
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
CONFIGS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gpt2": lambda: (
        hf.GPT2LMHeadModel,
        hf.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=128, bos_token_id=0, eos_token_id=0),
    ),
    "bert": lambda: (hf.BertForMaskedLM, hf.BertConfig(vocab_size=128, **SIZES)),
    "vit": lambda: (hf.ViTForImageClassification, hf.ViTConfig(image_size=32, patch_size=8, **SIZES)),
    "swin": lambda: (
        hf.SwinForImageClassification,
        hf.SwinConfig(image_size=32, depths=[1], num_heads=[2], embed_dim=16, window_size=4),
    ),
    "resnet": lambda: (
        hf.ResNetForImageClassification,
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    ),
    "t5": lambda: (
        hf.T5ForConditionalGeneration,
        hf.T5Config(
            d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=128, decoder_start_token_id=0
        ),
    ),
    "llama": lambda: (hf.LlamaForCausalLM, hf.LlamaConfig(vocab_size=128, num_key_value_heads=1, **SIZES)),
}
UNIFORM = mt.Policy.uniform(level=16)


def texts(count: int) -> dict[str, Tensor]:
    ids = torch.randint(128, (count, 128))
    return {"input_ids": ids, "labels": ids}


def images(count: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 32, 32), "labels": torch.randint(2, (count,))}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def of_config(name: str, **step: Any) -> mt.Workload:
    model_class, config = CONFIGS[name]()
    batch = texts if model_class.main_input_name == "input_ids" else images
    return mt.Workload(lambda: model_class(config), batch, loss_of, batch_size=4, **step)


def of_vit(**step: Any) -> mt.Workload:
    def batch(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 16, 16), torch.randint(10, (count,))

    return mt.Workload(ViT, batch, **{"loss": vit_loss, "batch_size": 8, **step})


def vit_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def real_step(workload: mt.Workload, policy: mt.Policy | None) -> StepMemory:
    model = workload.build()
    if policy is not None:
        mt.convert(model, policy, seed=workload.seed)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with mt.compress_saved(policy or mt.Policy.parse("")):
            return workload.compute_loss(model, batch)

    optimizer = workload.make_optimizer(model)
    return measure_step(model, workload.make_batch(), loss, optimizer, workload.training_step)


@pytest.mark.parametrize("step", [{}, {"autocast": "bfloat16", "accumulation": 4}], ids=["plain", "bf16 x4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_estimates_are_the_bytes_of_real_steps(name: str, step: dict[str, Any]) -> None:
    workload = of_config(name, **step)
    for policy in (None, UNIFORM):
        estimated, real = mt.estimate(workload, policy), real_step(workload, policy)
        assert estimated.saved_bytes == real.saved_bytes
        assert estimated.peak_bytes == pytest.approx(real.peak_bytes, rel=0.003)
        assert estimated.frame()["bytes"].sum() == estimated.saved_bytes


@pytest.mark.parametrize("name", ["vit", "resnet", "llama"])
def test_the_profile_of_bytes_is_the_real_one_without_prices(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = of_config(name)
    # Of modules that run again it knows nothing: no search chooses among them.
    monkeypatch.setattr(StepTracer, "rerun_modules", lambda *_: ())
    fake, real = bytes_only_profile(workload), mt.profile(workload, options=[])
    assert replace(fake.timeline, slots=()) == replace(real.timeline, slots=())
    for slot, other in zip(fake.timeline.slots, real.timeline.slots, strict=True):
        assert (slot.layer, slot.phase, slot.once.gradients) == (
            other.layer,
            other.phase,
            other.once.gradients,
        )
        # Of few rows, real steps have a few more bytes in tensors and fewer in workspaces.
        assert slot.once.live[:-1] == other.once.live[:-1]
        assert slot.once.live[-1] == pytest.approx(other.once.live[-1], abs=64)
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
    workload = of_vit()
    model, batch = workload.build(), workload.make_batch()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    estimated = mt.estimate(model, batch, vit_loss, optimizer=optimizer)
    assert estimated.saved_bytes == mt.estimate(workload).saved_bytes
    assert estimated.peak_bytes < mt.estimate(workload).peak_bytes  # one state per weight, not two
    twice = mt.estimate(model, batch, vit_loss, batch_size=16, optimizer=optimizer)
    assert twice.saved_bytes == mt.estimate(workload, batch_size=16).saved_bytes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(type(parameter) is nn.Parameter and parameter.grad is None for parameter in model.parameters())


def test_an_instance_is_estimated_with_what_a_training_script_has() -> None:
    torch.manual_seed(0)
    model, (x, y) = ViT(), of_vit(batch_size=20).make_batch()
    samples: Any = list(zip(x, y, strict=True))
    loader = torch.utils.data.DataLoader(samples, batch_size=8)  # the last batch has four samples
    state = torch.get_rng_state()
    parameters: Any = [{"params": model.blocks.parameters(), "lr": 0.1}, {"params": model.head.parameters()}]
    estimated = mt.estimate(model, loader, vit_loss, optimizer=torch.optim.AdamW(parameters))
    assert torch.equal(torch.get_rng_state(), state)
    whole = mt.estimate(of_vit())
    assert estimated.saved_bytes == whole.saved_bytes
    others = sum(each.nbytes for part in (model.embed, model.norm) for each in part.parameters())
    # No moments and steps of these, but their gradients, which no optimizer frees.
    assert whole.static_bytes - estimated.static_bytes == 2 * others + 4 * 4 - others


def test_a_model_on_the_meta_device_needs_no_memory() -> None:
    with torch.device("meta"):
        model = ViT()
    assert (
        mt.estimate(model, of_vit().make_batch(), vit_loss).saved_bytes == mt.estimate(of_vit()).saved_bytes
    )


def test_a_model_that_fits_no_machine_is_estimated() -> None:
    config = hf.LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=1, vocab_size=128000)
    workload = mt.Workload(lambda: hf.LlamaForCausalLM(config), texts, loss_of, batch_size=64)
    assert mt.estimate(workload).static_bytes > 3 * 4 * 2 * 128000 * 8192


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    estimated = mt.estimate(of_vit())
    size = estimated.largest_batch("20MB")
    assert mt.estimate(of_vit(batch_size=size)).fits("20MB")
    assert not mt.estimate(of_vit(batch_size=size + 1)).fits("20MB")
    assert estimated.largest_batch("1kB") == 0
    assert estimated.fits(estimated.needed_bytes)
    assert not estimated.fits(estimated.needed_bytes - 1)


@pytest.mark.parametrize(
    ("limit", "what"),
    [("40%", "not a share"), ("much", "not an amount"), ("24", "in bytes"), (0.6, "in bytes")],
)
def test_limits_are_amounts(limit: Any, what: str) -> None:
    with pytest.raises(BudgetError, match=what):
        mt.estimate(of_vit()).fits(limit)


def test_random_states_stay_as_they_are() -> None:
    before = torch.get_rng_state()
    mt.estimate(of_vit())
    assert torch.equal(before, torch.get_rng_state())


class Choosing(nn.Linear):
    """Takes one of two branches by what it computes."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y.relu() if y.sum() > 0 else y


class Selecting(nn.Linear):
    """Computes as many rows as have a positive sum."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input[input.sum(1).nonzero().squeeze(1)])


@pytest.mark.parametrize("kind", [Choosing, Selecting])
def test_a_step_that_depends_on_values_is_an_error_with_its_line(kind: Any) -> None:
    workload = mt.Workload(
        lambda: kind(8, 8), lambda n: torch.randn(n, 8), lambda model, x: model(x).sum(), batch_size=4
    )
    with pytest.raises(WorkloadError, match=r"test_estimation\.py:\d+: loss\(\).*\n.*\n.*real steps"):
        mt.estimate(workload)


def test_models_that_read_values_while_they_are_built_are_fine() -> None:
    def model() -> nn.Module:
        rates = torch.linspace(0, 0.5, 3).tolist()
        large = nn.Linear(512, 512)
        nn.init.trunc_normal_(large.weight, std=0.02)
        return nn.Sequential(large, nn.Dropout(rates[1]), nn.Linear(512, 1))

    def batch(count: int) -> Tensor:
        return torch.randn(count, 512)[:, torch.randperm(512)]

    workload = mt.Workload(model, batch, lambda model, x: model(x).sum(), batch_size=4)
    assert mt.estimate(workload).saved_bytes == real_step(workload, None).saved_bytes


class Tied(nn.Module):
    """A language model whose output layer has the weights of its embedding, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(512, 256), nn.Linear(256, 256)
        self.output = nn.Linear(256, 512, bias=False)
        self.output.weight = self.embedding.weight
        self.bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.output(F.gelu(self.hidden(self.embedding(tokens))))
        return logits


@pytest.mark.parametrize("policy", [None, UNIFORM], ids=["plain", "uniform"])
def test_a_model_may_change_its_dtype_while_it_is_built(policy: mt.Policy | None) -> None:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    workload = mt.Workload(Tied, lambda count: torch.randint(512, (count, 64)), loss, batch_size=4)
    estimated, real = mt.estimate(workload, policy), real_step(workload, policy)
    assert (estimated.saved_bytes, estimated.peak_bytes) == (real.saved_bytes, real.peak_bytes)


def saved_dtypes(profile: Profile) -> dict[str, set[str]]:
    saved: dict[str, set[str]] = {}
    for tensor in profile.tensors:
        saved.setdefault(tensor.owner, set()).add(tensor.dtype)
    return saved


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(32, 96), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fc(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(2)
        return F.dropout(self.norm(y), 0.1)


def of_attention(**step: Any) -> mt.Workload:
    return mt.Workload(
        Attending, lambda n: torch.randn(n, 64, 32), lambda m, x: m(x).float().sum(), batch_size=4, **step
    )


def test_cuda_saves_what_its_kernels_save() -> None:
    tokens, heads, length = 4 * 64, 2, 64
    cpu, cuda = (bytes_only_profile(of_attention(), cuda=flag) for flag in (False, True))
    scores = 4 * heads * length * length
    assert max(tensor.bytes for tensor in cpu.tensors) == 4 * scores  # the CPU writes dropout's softmax out
    assert max(tensor.bytes for tensor in cuda.tensors) == 4 * tokens * 96
    dropped = next(tensor for tensor in cuda.tensors if tensor.owner.startswith("dropout"))
    assert (dropped.dtype, dropped.bytes) == ("bool", tokens * 32)
    assert [tensor.bytes for tensor in cuda.tensors if tensor.shape == (4, heads, length)] == [
        4 * tokens * heads
    ]
    assert cuda.device == "cuda"
    assert "few GPUs have checked" in cuda.notes[0]


def test_autocast_on_cuda_normalizes_in_float32() -> None:
    cpu, cuda = (
        saved_dtypes(bytes_only_profile(of_attention(autocast="bfloat16"), cuda=flag))
        for flag in (False, True)
    )
    assert "bfloat16" in cpu["norm"]
    assert cuda["norm"] == {"float32"}


@pytest.mark.parametrize("enter", [torch.autocast, torch.amp.autocast])
def test_autocast_for_cuda_inside_the_loss_counts_on_cuda(enter: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with enter("cuda", torch.bfloat16):
            return vit_loss(model, batch)

    inside = of_vit(loss=loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = mt.estimate(inside, device="cuda")
    around = mt.estimate(of_vit(autocast="bfloat16"), device="cuda")
    assert own.saved_bytes == around.saved_bytes < mt.estimate(of_vit(), device="cuda").saved_bytes
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert mt.estimate(inside).saved_bytes == mt.estimate(of_vit()).saved_bytes


def test_cuda_is_unverified_and_reserves_more_than_the_peak() -> None:
    estimated = mt.estimate(of_vit(), device="cuda")
    assert not estimated.verified
    assert estimated.margin >= 0.1
    assert estimated.reserved_bytes >= estimated.peak_bytes > mt.estimate(of_vit()).static_bytes
    assert estimated.needed_bytes > 1.1 * estimated.reserved_bytes
    assert mt.estimate(of_vit(), device="cpu").verified


@pytest.mark.parametrize(
    ("device", "message"),
    [("tpu", "must be cpu, cuda or cuda:N"), ("mps", "not on MPS"), ("xpu", "not on XPU")],
)
def test_an_unknown_device_is_an_error(device: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        mt.estimate(of_vit(), device=device)


def test_a_file_is_not_a_workload() -> None:
    with pytest.raises(WorkloadError, match=r"'hf:config\.json': is neither a Workload"):
        mt.estimate("hf:config.json")  # type: ignore[call-overload]


def test_on_cuda_a_policy_holds_from_the_first_step() -> None:
    plain, four = (
        mt.estimate(of_vit(), policy, device="cuda") for policy in (None, mt.Policy.uniform(level=16))
    )
    saved = mt.estimate(of_vit(), mt.Policy.uniform(level=16)).saved_bytes
    assert four.peak_bytes < plain.peak_bytes - 0.5 * (plain.saved_bytes - saved)


def test_an_lstm_is_estimated_too_low_with_a_warning() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.lstm(x)[0])
            return out

    workload = mt.Workload(
        Recurrent,
        lambda count: (torch.randn(count, 16, 32), torch.randint(0, 10, (count, 16))),
        lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        batch_size=4,
        device="cpu",
    )
    with pytest.warns(UserWarning, match="'lstm' are estimated too low"):
        mt.estimate(workload)


@pytest.mark.parametrize("packed", [False, True], ids=["one text", "packed texts"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_mask_for_packed_texts_is_made_where_a_real_step_makes_it(name: str, packed: bool) -> None:
    """Without a cache, transformers asks the values of positions whether texts are packed into a row."""

    def batch(count: int) -> dict[str, Tensor]:
        positions = {"position_ids": torch.arange(64).repeat(count, 2)} if packed else {}
        return texts(count) | positions

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss_of(model, {**batch, "use_cache": False})  # type: ignore[dict-item]

    workload = replace(of_config(name), batch=batch, loss=loss)
    for policy in (None, UNIFORM):
        estimated, real = mt.estimate(workload, policy), real_step(workload, policy)
        assert estimated.saved_bytes == real.saved_bytes
        assert estimated.peak_bytes == pytest.approx(real.peak_bytes, rel=0.003)


def test_a_model_that_copies_its_layers_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)  # a weight of 2¹⁷ elements is fake
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    work = mt.Workload(encoder, lambda n: torch.rand(n, 16, 256), lambda net, x: net(x).mean(), batch_size=2)
    torch.set_warn_always(True)
    try:
        mt.estimate(work)
    finally:
        torch.set_warn_always(False)
    assert not [str(warning.message) for warning in recwarn]
