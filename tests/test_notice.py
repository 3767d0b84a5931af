"""Warnings that are shown once, attempts that must not use them up, and progress in a file."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import mesa_tune as mt
from mesa_tune import notice
from mesa_tune.notice import unnoticed, warn_once
from tests.builders import Capture, Patch


def _failing_attempt(text: str) -> None:
    with unnoticed():
        warn_once(text)
        raise ZeroDivisionError


def test_a_warning_of_an_attempt_that_failed_is_shown_later() -> None:
    text = "mesa-tune: a warning of the test of attempts."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError):
            _failing_attempt(text)
    with pytest.warns(UserWarning, match="of the test of attempts"):
        assert warn_once(text)
    assert not warn_once(text)


def test_progress_in_a_file_is_whole_lines(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(notice, "STATUS_EVERY_S", 0.0)
    work = mt.Workload(
        lambda: nn.Linear(4, 4), lambda n: torch.rand(n, 4), lambda model, x: model(x).sum(), batch_size=2
    )
    mt.profile(work, options=[], progress=True)
    shown = capsys.readouterr().err
    assert "0% tracing a step\n" in shown
    assert shown.endswith("\n")
    assert not {"\r", "\x1b"} & set(shown)
