from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mesa_tune import Policy, cli
from mesa_tune.profiles.profile import Profile
from mesa_tune.workload.workload import Workload

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))


def digits_vit() -> Any:
    """The example as a module."""
    return sys.modules[Workload.load(EXAMPLES / "digits_vit.py", device="cpu").model.__module__]


def test_the_index_lists_every_example() -> None:
    index = (EXAMPLES / "README.md").read_text("utf-8")
    assert sorted(re.findall(r"^\| \[(\w+\.py)\]", index, re.MULTILINE)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_a_model_file_that_trains(name: str) -> None:
    workload = Workload.load(EXAMPLES / name, device="cpu")
    model, batch = workload.build(), workload.make_batch(2)
    optimizer = workload.make_optimizer(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    workload.compute_loss(model, batch).backward()
    optimizer.step()
    changed = [not torch.equal(old, new) for old, new in zip(before, trained, strict=True)]
    assert sum(changed) > 0.9 * len(changed)


@pytest.mark.slow("sweep")
@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_every_example_are_traced(name: str, tmp_path: Path) -> None:
    command = ["profile", str(EXAMPLES / name), "--bytes-only", "--batch-size", "2", "--run", str(tmp_path)]
    assert cli.run([*command, "--quiet"]) == 0
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.predict(Policy.uniform(level=16)).saved_bytes < profile.saved_bytes / 2


def test_deit_has_its_published_size() -> None:
    model = Workload.load(EXAMPLES / "deit_tiny.py", device="cpu").build()
    # 5,717,416 in the paper's model; transformers adds a distillation token and its position.
    assert sum(parameter.numel() for parameter in model.parameters()) == 5_717_416 + 2 * 192


def test_crops_of_the_photographs_tell_their_cell() -> None:
    images, labels = Workload.load(EXAMPLES / "deit_tiny.py", device="cpu").make_batch(64)
    assert images.shape == (64, 3, 224, 224)
    assert 0.5 < images.std() < 1.5
    assert labels.min() >= 0
    assert labels.max() < 12
    assert len(labels.unique()) > 6


def test_digits_are_split_once_and_for_all() -> None:
    names = digits_vit()
    (train, train_labels), (test, test_labels) = names.digits()
    assert train.shape == (1437, 1, 32, 32)
    assert test.shape == (360, 1, 32, 32)
    assert sorted(test_labels.unique().tolist()) == list(range(10))
    assert len(train_labels) + len(test_labels) == 1797
    rows = {tuple(image.flatten().tolist()) for image in test}
    assert not any(tuple(image.flatten().tolist()) in rows for image in train[:200])


def test_the_digits_model_knows_where_a_patch_is() -> None:
    model = Workload.load(EXAMPLES / "digits_vit.py", device="cpu").build()
    positions = model.get_parameter("positions")[0]
    distances = torch.cdist(positions, positions) + 10 * torch.eye(len(positions))
    assert distances.min() > 0.1


def test_a_few_steps_learn_and_repeat() -> None:
    names = digits_vit()
    assert names.train(steps=2, seed=3) == names.train(steps=2, seed=3)


LIGHTNING = pytest.param("lightning_digits.py", {"epochs": 1}, marks=pytest.mark.slow("training"))


@pytest.mark.parametrize(("name", "length"), [("trainer_text.py", {"steps": 2}), LIGHTNING])
def test_examples_of_frameworks_train_plain_and_with_a_policy(
    name: str, length: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workload = Workload.load(EXAMPLES / name, device="cpu")
    train = sys.modules[workload.model.__module__].train
    Policy.uniform(level=4).save("policy.txt")
    plain, compressed = train(**length), train("policy.txt", **length)
    assert 0 < plain < 6
    assert compressed == pytest.approx(plain, rel=0.1)
    assert compressed != plain


@pytest.mark.slow("training")
@pytest.mark.timeout(900)
def test_the_script_trains() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, str(EXAMPLES / "digits_vit.py"), "--seed", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    accuracy = float(done.stdout.removeprefix("test accuracy ").removesuffix(" %\n"))
    assert accuracy > 95


@pytest.mark.slow("training")
def test_training_with_a_policy_starts_from_the_same_model() -> None:
    names = digits_vit()
    made: list[nn.Module] = []
    plain_model = names.model

    def remembered() -> nn.Module:
        made.append(plain_model())
        return made[-1]

    names.model = remembered
    plain = names.train(steps=2)
    compressed = names.train(Policy.uniform(level=256), steps=2)
    names.model = plain_model
    assert 0 <= plain <= 1
    assert 0 <= compressed <= 1
    one, other = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in made)
    # Eight bits change what two steps of Adam learn a little, and not at all what they started from.
    assert 0 < (one - other).norm() < 0.01 * one.norm()
