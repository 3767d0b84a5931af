"""Warnings that are shown once, and attempts that must not use them up."""

from __future__ import annotations

import warnings

import pytest

from mesa_tune.notice import unnoticed, warn_once


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
