"""README and docs: code blocks run, policies parse, links lead to files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mesa_tune as mt
from mesa_tune.policy.settings import STORES
from mesa_tune.units import format_bytes
from mesa_tune.workload import local_modules
from tests.builders import cross_entropy, known, mean, workload

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BATCH = 8


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language ("": without one); a word after the language is ignored."""
    # All blocks are looked for: the end of one in Python is no beginning of one without a language.
    pattern = re.compile(r"^```(\w*)(?: \w+)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [text for name, text in pattern.findall(page.read_text("utf-8")) if name == language]


class ReadersModel(nn.Sequential):
    """A model of its own class: a warning is given once per process, and would be missed by other tests."""


def small_model() -> nn.Module:
    return ReadersModel(nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 10))


def migrating_names() -> dict[str, Any]:
    """The names that docs/migrating.md takes from the reader's program; writes Mesa's policy.txt."""
    Path("policy.txt").write_text("on fc:\n    by_index: all\n    enable: True\n    level: 256\n")
    model = small_model()
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loss_function": F.cross_entropy,
        # 128 × 48 elements: GACT compresses no tensor of up to 4,096.
        "loader": [(torch.randn(128, 48), torch.randint(0, 10, (128,)))] * 2,
    }


def concepts_names() -> dict[str, Any]:
    """The names that docs/concepts.md takes from the reader's program."""
    policy = mt.Policy.uniform(level=16)
    model = mt.convert(small_model(), policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(12800, 48), torch.randint(0, 10, (12800,))), 128)
    names = {"mt": mt, "torch": torch, "F": F, "pd": pd, "make_model": small_model, "train_step": train_step}
    given = {"policy": policy, "model": model, "optimizer": optimizer, "loss": cross_entropy}
    return {**names, **given, "loader": loader}


def estimates_names() -> dict[str, Any]:
    """The names that docs/estimates.md takes from the reader's program."""
    return {"mt": mt, "workload": workload(small_model, lambda n: torch.rand(n, 48), mean)}


def howto_names() -> dict[str, Any]:
    """The names that docs/howto.md takes from the reader's program."""
    batches = [torch.rand(BATCH, 48) for _ in range(2)]
    given = {"model": small_model(), "batch": batches[0], "loader": batches, "loss": mean}
    return {"mt": mt, "torch": torch, "policy": mt.Policy.uniform(level=16), **given}


def tutorial_names() -> dict[str, Any]:
    """Write model.py as on docs/tutorial.md, but for one step of training, and the policy of the page."""
    page = ROOT / "docs" / "tutorial.md"
    Path("model.py").write_text(blocks(page, "python")[0].replace("STEPS = 300", "STEPS = 1"))
    Path("mesa-run").mkdir(exist_ok=True)
    mt.Policy.parse(blocks(page, "policy")[0]).save("mesa-run/policy.txt", force=True)
    return {}


def integrations_names() -> dict[str, Any]:
    """The names that docs/integrations.md takes from the reader's program; writes policy.txt."""
    from accelerate import Accelerator
    from transformers import TrainingArguments

    from tests.integrations.test_lightning import Classifier, loader
    from tests.integrations.test_transformers import Texts, text_model

    policy, model = mt.Policy.uniform(level=16), text_model()
    policy.save("policy.txt", force=True)
    arguments = TrainingArguments("run", max_steps=1, report_to=[], use_cpu=True)
    given = {"mt": mt, "policy": policy, "model": model, "arguments": arguments, "dataset": Texts()}
    given |= {"module": Classifier(), "loader": loader(), "accelerator": Accelerator(cpu=True)}
    return {**given, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}


def train_step(model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    cross_entropy(model, batch).backward()
    optimizer.step()


NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "estimates.md": estimates_names,
    "integrations.md": integrations_names,
    "migrating.md": migrating_names,
    "concepts.md": concepts_names,
    "howto.md": howto_names,
    "tutorial.md": tutorial_names,
}


@pytest.mark.parametrize(
    "page", [page for page in PAGES[1:] if blocks(page, "python")], ids=lambda page: page.name
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_python_blocks_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    monkeypatch.setattr(local_modules._finder, "modules", {})  # a file of another test may import its `model`
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        names |= NAMES.get(page.name, dict)()
        exec(compile(block, f"{page.name}", "exec"), names)
    sys.modules.pop("model", None)


def test_the_tutorial_profiles_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
    Path("model.py").write_text(blocks(ROOT / "docs" / "tutorial.md", "python")[0])
    estimate = mt.estimate(mt.Workload.load("model.py", device="cpu"))
    saved = {row["layer"]: row for row in estimate.frame().to_dict("records")}
    assert f"peak of a step     {format_bytes(estimate.peak_bytes)} " in page
    assert f"saved activations  {format_bytes(estimate.saved_bytes)} " in page
    rows = "self_attn  attention", "gelu.0          gelu", "dropout      dropout", "linear2           fc"
    for row in rows:
        name, tag = f"layers.layers.0.{row}".split()
        assert saved[name]["tag"] == tag
        assert f"{row}  {format_bytes(saved[name]['bytes'])} " in page


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "policy")], ids=lambda page: page.name
)
def test_policies_parse_and_survive_writing(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesa_tune.policy.settings.STORES", [*STORES, "half"])  # the codec of extending.md
    for block in blocks(page, "policy"):
        policy = mt.Policy.parse(block)
        assert policy.rules
        assert not policy.warnings
        assert mt.Policy.parse(policy.dumps()) == policy


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    languages = {
        word for page in PAGES for word in re.findall(r"^```(\w+)", page.read_text("utf-8"), re.MULTILINE)
    }
    assert languages <= {"python", "policy"}


def test_the_first_block_converts() -> None:
    first, _, _, _ = blocks(PAGES[0], "python")  # each of the four has a test here
    model = nn.Linear(4, 4)
    exec(first, {"model": model})
    assert mt.revert(model) is model


def test_the_model_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(blocks(PAGES[0], "python")[1])
    work = mt.Workload.load(path, batch_size=BATCH)
    assert torch.isfinite(work.compute_loss(work.build(), work.make_batch()))


def test_the_training_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mesa-run").mkdir()
    mt.Policy.uniform(level=16).save("mesa-run/policy.txt")
    script = blocks(PAGES[0], "python")[2]
    model = nn.Linear(784, 10)
    names = {"mt": mt, "F": F, "model": model, "images": torch.rand(BATCH, 784)}
    names["labels"] = torch.randint(0, 10, (BATCH,))
    exec(script, names)
    names["loss"].backward()  # type: ignore[attr-defined]
    assert torch.isfinite(known(model.weight.grad)).all()


def test_the_one_call_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loader: DataLoader[Tensor] = DataLoader(torch.rand(2 * BATCH, 48), BATCH)  # type: ignore[arg-type]
    names = {**howto_names(), "optimizer": None, "loader": loader}
    exec(blocks(PAGES[0], "python")[3], names)
    assert Path("mesa-run/policy.txt").is_file()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    typed = re.findall(r"^(?:\$ )?make ([\w-]+)", "\n".join(blocks(page, "")), re.MULTILINE)
    assert set(typed) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_that_pages_name_exist(page: Path) -> None:
    scripts = re.findall(r"`python ((?:benchmarks|examples)/\w+\.py)", page.read_text("utf-8"))
    assert all((ROOT / script).is_file() for script in scripts)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name
)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text("utf-8"))
    assert all((page.parent / link).exists() for link in links if not link.startswith("http"))


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text("utf-8").splitlines()) <= 150
