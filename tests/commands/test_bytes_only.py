"""`mesa-tune profile --bytes-only`, of a model file and of configurations of transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import mesa_tune as mt
from mesa_tune import cli
from mesa_tune.commands.common import format_bytes
from tests.builders import Capture, Patch

LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
LLAMA |= {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 1, "vocab_size": 32000}
LLAMA |= {"num_attention_heads": 32, "max_position_embeddings": 4096}
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
BERT = {"model_type": "bert", "vocab_size": 64, **TINY}
VIT = {"model_type": "vit", "image_size": 32, "patch_size": 8, **TINY}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
MODEL = """\
import torch
from torch import nn

def model(): return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1))
def batch(n): return torch.rand(n, 64)
def loss(model, batch): return model(batch).square().mean()
BATCH_SIZE = 128
"""


@pytest.fixture(autouse=True)
def fresh_folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(**values: Any) -> str:
    Path("config.json").write_text(json.dumps(values))
    return "hf:config.json"


def profiled(capsys: Capture, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run the command with `--json`; return its document and its other output."""
    status = cli.run(["profile", *arguments, "--bytes-only", "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out), err


def failed(capsys: Capture, *arguments: str) -> str:
    assert cli.run([*arguments]) == 1
    lines = capsys.readouterr().err
    assert 1 <= len(lines.splitlines()) <= 3
    return lines


def test_a_layer_of_seven_billion_weights_needs_no_memory(capsys: Capture) -> None:
    document, shown = profiled(capsys, config(**LLAMA), "--batch-size", "2", "--length", "2048")
    weights = 2 * 32000 * 4096 + 4 * 4096**2 + 3 * 4096 * 11008 + 3 * 4096
    assert "LlamaForCausalLM on 2048 tokens at batch size 2" in shown
    assert 0 <= document["static_bytes"] - 3 * 4 * weights < 1e5  # AdamW, and the batch
    assert document["step_ms"] is None
    assert not any(layer["options"] for layer in document["layers"])


@pytest.mark.parametrize(
    ("values", "about"),
    [
        pytest.param(BERT, "BertForMaskedLM on 512 tokens", marks=pytest.mark.slow("sweep")),
        ({**BERT, "architectures": ["BertLMHeadModel"]}, "BertLMHeadModel on 512 tokens"),
        (VIT, "ViTForImageClassification on images of 32 x 32"),
        pytest.param(T5, "T5ForConditionalGeneration on 1024 tokens", marks=pytest.mark.slow("sweep")),
    ],
    ids=["bert", "bert as named", "vit", "t5"],
)
def test_a_configuration_says_what_is_trained(values: dict[str, Any], about: str, capsys: Capture) -> None:
    _, shown = profiled(capsys, config(**values), "--batch-size", "2")
    assert f"tracing {about}" in shown


def test_a_model_file_is_traced_and_then_really_profiled(capsys: Capture) -> None:
    Path("model.py").write_text(MODEL)
    document, _ = profiled(capsys, "model.py", "--device", "cpu")
    assert "no prices" in failed(capsys, "search", "--budget", "50%")
    assert cli.run(["report", "--format", "json"]) == 0
    assert cli.run(["profile", "model.py", "--device", "cpu", "--fast", "--json"]) == 0  # replaces it

    written = json.loads(Path("mesa-run/profile.json").read_text())

    assert all(written[name] == document[name] for name in ("saved_bytes", "peak_bytes"))
    assert written["step_ms"] > 0
    capsys.readouterr()
    assert "other inputs" in failed(capsys, "profile", "model.py", "--device", "cpu", "--bytes-only")


def test_cuda_is_modelled_where_there_is_none(capsys: Capture) -> None:
    Path("model.py").write_text(MODEL)
    document, shown = profiled(capsys, "model.py", "--device", "cuda")
    assert document["device"] == "cuda"
    assert "few GPUs have checked" in shown


def test_which_batch_sizes_fit_a_limit(capsys: Capture) -> None:
    Path("model.py").write_text(MODEL)
    plain, limit = mt.estimate(mt.Workload.load("model.py", device="cpu")), "60MB"
    _, shown = profiled(capsys, "model.py", "--device", "cpu", "--fits", limit)
    rows = {line[:9].strip(): line[9:].split() for line in shown.splitlines()}
    assert rows["on cpu"] == ["needs", "fits", "60MB", "largest", "batch"]
    needed, unit, fits, largest = rows["plain"]
    assert (f"{needed} {unit}", fits) == (format_bytes(plain.needed_bytes), "yes")
    assert int(largest) == plain.largest_batch(limit)
    assert int(rows["at 4 bits"][-1]) >= int(rows["at 8 bits"][-1]) > int(largest) > 128


TEXTS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(64, 32), nn.Linear(32, 256), nn.Linear(256, 64)
    def forward(self, ids): return self.down(torch.relu(self.up(self.embed(ids))))

def model(): return Net()
def batch(n, length): return torch.randint(64, (n, length))
def loss(model, ids): return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
BATCH_SIZE, LENGTH = 4, 1024
"""


def test_how_long_samples_fit_a_limit(capsys: Capture) -> None:
    Path("model.py").write_text(TEXTS)
    workload, limit = mt.Workload.load("model.py", device="cpu"), "60MB"
    plain, packed = mt.estimate(workload), mt.estimate(workload, mt.Policy.uniform(level=16))
    longest = plain.largest_length(limit)
    at_most = mt.estimate(mt.Workload.load("model.py", device="cpu", length=longest))
    assert at_most.fits(limit)
    assert not mt.estimate(mt.Workload.load("model.py", device="cpu", length=int(1.04 * longest))).fits(limit)
    _, shown = profiled(capsys, "model.py", "--device", "cpu", "--fits", limit)
    rows = {
        line.split("  ")[0]: line.split()[-1]
        for line in shown.splitlines()
        if line and not line.startswith(" ")
    }
    assert rows["on cpu"] == "longest"
    assert int(rows["plain"]) == longest
    assert int(rows["at 4 bits"]) == packed.largest_length(limit) > 1.5 * longest
    document, _ = profiled(capsys, "model.py", "--device", "cpu", "--length", str(longest), "--force")
    assert document["peak_bytes"] == at_most.peak_bytes


def test_a_length_of_the_files_own_is_left_alone(capsys: Capture) -> None:
    Path("model.py").write_text(MODEL + "LENGTH = 7\n")
    assert mt.Workload.load("model.py", device="cpu").length is None
    profiled(capsys, "model.py", "--device", "cpu")


def test_samples_without_length_have_no_longest() -> None:
    Path("model.py").write_text(MODEL)
    with pytest.raises(mt.WorkloadError, match="largest_length: the samples"):
        mt.estimate(mt.Workload.load("model.py", device="cpu")).largest_length("1GB")


@pytest.mark.slow("sweep")
def test_slices_of_the_loss_are_among_what_fits(capsys: Capture) -> None:
    # Large logits beside blocks that are large enough to matter where the logits have slices.
    sizes = {**TINY, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256}
    name = config(model_type="llama", vocab_size=2048, **sizes)
    _, shown = profiled(capsys, name, "--batch-size", "2", "--length", "64", "--fits", "60MB")
    largest = {line[:27].strip(): line.split()[-1] for line in shown.splitlines() if line}
    assert int(largest["at 4 bits, loss in slices"]) > 1.5 * int(largest["at 4 bits"])
    assert int(largest["…, blocks that run again"]) > int(largest["at 4 bits, loss in slices"])
    assert "blocks that run again: `store: recompute` in `on module:`" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["hf:config.json"], "add --bytes-only"),
        (["model.py", "--fits", "2GB"], "search with --budget 2GB"),
        (["model.py", "--fits", "40%", "--bytes-only"], "not a share"),
        (["model.py", "--length", "8", "--bytes-only"], "model.py: its samples have no other length"),
        (["model.py", "--length", "8"], "set LENGTH in the model file"),
        (["model.py", "--fast", "--bytes-only"], "exclude each other"),
        (["model.py", "--timeout", "9", "--bytes-only"], "--timeout: not for this profile"),
        (["model.py", "--lora", "8", "--bytes-only"], "--lora 8"),
        (["hf:none.json", "--bytes-only"], "cannot be read"),
        (["hf:nobody/nothing", "--bytes-only"], "no config.json in transformers' cache or on the hub"),
        (["hf:config.json", "--bytes-only", "--length", "8"], "images have no --length"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_errors(arguments: list[str], what: str, capsys: Capture) -> None:
    Path("model.py").write_text(MODEL)
    config(**VIT)
    assert what in failed(capsys, "profile", *arguments)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"hidden_size": 8}, "no JSON object with a `model_type`"),
        ({"model_type": "unheard of"}, "unheard of"),
        ({"model_type": "wav2vec2"}, "has no class"),
    ],
    ids=["no type", "unknown", "no task"],
)
def test_other_files_are_errors(values: dict[str, Any], what: str, capsys: Capture) -> None:
    assert what in failed(capsys, "profile", config(**values), "--bytes-only")


def test_without_transformers_the_error_says_so(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in failed(capsys, "profile", config(**LLAMA), "--bytes-only")
