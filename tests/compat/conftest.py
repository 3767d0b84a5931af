"""Configurations of the projects are the defaults again after each test."""

from collections.abc import Iterator
from dataclasses import fields

import pytest

from mesa_tune.compat import actnn, gact


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    for config, plain in (
        (actnn.config, actnn.QuantizationConfig()),
        (gact.config, gact.QuantizationConfig()),
    ):
        for field in fields(plain):
            setattr(config, field.name, getattr(plain, field.name))
    actnn.QScheme.num_samples, actnn.QScheme.batch = 1, None
