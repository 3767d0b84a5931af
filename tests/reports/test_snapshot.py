"""The step as a memory snapshot: PyTorch's own viewer reads it, and its peak is that of the timeline."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from mesa_tune import cli
from mesa_tune.policy import Policy
from mesa_tune.policy.settings import LayerSettings
from mesa_tune.profiles.profile import Profile
from mesa_tune.reports.frames import sized_step
from mesa_tune.reports.snapshot import snapshot
from mesa_tune.search import search_policy
from tests.reports.test_report_page import PLAN, PROFILE, fill
from tests.synthetic import synthetic_profile

POLICIES = {
    "plain": Policy(),
    "4 bits": Policy.uniform(level=16),
    "derived": Policy.uniform(level=16, store="derive"),
    "kept ranges": Policy.uniform(level=256, ema_decay=0.9),
    "searched": search_policy(PROFILE, "60%").policy,
}


def alive(events: list[dict[str, Any]]) -> list[int]:
    """The bytes that are alive after each event. No block is freed that is not there."""
    blocks: dict[int, int] = {}
    sums = []
    for event in events:
        if event["action"] == "alloc":
            assert event["addr"] not in blocks
            blocks[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert blocks.pop(event["addr"]) == event["size"]
        sums.append(sum(blocks.values()))
    return sums


@pytest.mark.parametrize("name", POLICIES)
def test_peak_and_moment_are_those_of_the_timeline(name: str) -> None:
    sized, assignment = sized_step(PROFILE, PROFILE.assignment(POLICIES[name]))
    made = snapshot(sized, assignment)
    (events,) = made["device_traces"]
    sums, step = alive(events), sized.under(assignment)
    assert max(sums) == step.peak_bytes
    at_peak = [
        event["frames"][0]["name"] for event, size in zip(events, sums, strict=True) if size == max(sums)
    ]
    assert any(step.peak.layer is None or step.peak.layer in text for text in at_peak)
    _memory_viz.trace_plot(made)
    assert "TOTAL MEM" in _memory_viz.trace(made)
    assert _memory_viz.segsum(made)
    left = sum(segment["allocated_size"] for segment in made["segments"])
    assert left == sums[-1]


def test_what_was_never_written_is_not_counted() -> None:
    """As of an LSTM's workspace: working memory below zero."""
    profile = synthetic_profile(1)
    sized = profile.timeline.at()
    slot = int(sized.live({}).argmax())
    sized.once.live[slot] -= 5_000 + sized.once.live[slot]
    (events,) = snapshot(sized, {})["device_traces"]
    assert max(alive(events)) == sized.peak_bytes({})


def test_the_command_writes_both_steps(tmp_path: Path) -> None:
    folder = fill(tmp_path, plan=PLAN)
    assert cli.run(["report", "--run", str(folder), "--format", "snapshot"]) == 0
    profile = Profile.load(folder / "profile.json")
    for name, peak in (
        ("plain", profile.predict(Policy()).peak_bytes),
        ("policy", PLAN.predicted.peak_bytes),
    ):
        made = pickle.loads((folder / f"snapshot-{name}.pickle").read_bytes())
        assert max(alive(made["device_traces"][0])) == peak


def test_without_a_plan_there_is_the_plain_step_alone(tmp_path: Path) -> None:
    folder = fill(tmp_path)
    assert cli.run(["report", "--run", str(folder), "--format", "snapshot"]) == 0
    assert [path.name for path in folder.glob("snapshot-*")] == ["snapshot-plain.pickle"]


def test_blocks_name_their_layers() -> None:
    settings = LayerSettings(level=16)
    layer = max(PROFILE.layers, key=lambda layer: layer.own_bytes).name
    (events,) = snapshot(*sized_step(PROFILE, {layer: settings}))["device_traces"]
    frames = [event["frames"][0] for event in events]
    assert any(layer in frame["name"] and frame["filename"] == "saved tensors" for frame in frames)
