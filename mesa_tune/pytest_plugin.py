"""The pytest marker `limit_saved`: a test fails if a backward in it finds more saved bytes than its limit.

Every run of pytest imports this module where mesa-tune is installed, so it imports torch only for a test that
has the marker.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator

import pytest

MARKER = "limit_saved"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f'{MARKER}("6GB"): fail if a forward in the test saves more bytes than this for its backward',
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return (yield)
    if len(marker.args) != 1 or marker.kwargs:
        pytest.fail(f'{MARKER} takes one argument, the limit: @pytest.mark.{MARKER}("6GB")', pytrace=False)
    from mesa_tune.measure.saved_limit import LimitMeter

    with LimitMeter(marker.args[0]) as meter:
        result = yield
    if not meter.backwards:
        warnings.warn(f"{item.nodeid}: {MARKER} measured nothing, because no backward ran", stacklevel=1)
    if meter.over_limit:
        pytest.fail(meter.explanation(), pytrace=False)
    return result
