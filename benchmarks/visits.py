"""How many of mesa-tune's Python functions and files does one call inside a converted model enter?

    python benchmarks/visits.py

A call begins where PyTorch hands it to the routing mode, and ends where that returns. Planned: a call of a
shape that the layer has not had. Cached: a later call like it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from common import append
from torch import Tensor, nn

import mesa_tune as mt

HOME = str(Path(mt.__file__).parent)
CACHED_AFTER = 3


class SelfAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x * 2, x * 3)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "linear": (lambda: nn.Linear(256, 256), (128, 256), "linear"),
    "layer norm": (lambda: nn.LayerNorm(256), (128, 256), "layer_norm"),
    "GELU": (nn.GELU, (128, 256), "gelu"),
    "attention": (SelfAttention, (4, 4, 64, 32), "scaled_dot_product_attention"),
}


Run = Callable[[], Any]


def visited(run: Run, function: str) -> tuple[list[str], list[str]]:
    """Return the files of mesa-tune's functions entered during `run`, and during the call of `function`."""
    every: list[str] = []
    call: list[str] = []
    depth = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        code = frame.f_code
        if not code.co_filename.startswith(HOME):
            return
        inside = code.co_name == "__torch_function__" and frame.f_locals["func"].__name__ == function
        if event == "call":
            depth += inside
            every.append(code.co_filename)
            if depth:
                call.append(code.co_filename)
        elif event == "return":
            depth -= inside

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return every, call


def counts(files: list[str]) -> dict[str, int]:
    """Return how many functions were entered, in how many files, with how many switches between files."""
    switches = sum(before != after for before, after in pairwise(files))
    return {"calls": len(files), "files": len(set(files)), "switches": switches}


def names(files: list[str]) -> list[str]:
    """Return the files without their folders, in the order of the first visit."""
    return [str(Path(file).relative_to(HOME).with_suffix("")) for file in dict.fromkeys(files)]


def main() -> None:
    rows = []
    for name, (make, shape, function) in CASES.items():
        x = torch.randn(shape, requires_grad=True)
        model = mt.convert(make(), mt.Policy.uniform(level=16))
        model(x[:2] * 1)
        for kind in ("planned", "cached"):
            every, call = visited(lambda model=model, x=x * 1: model(x), function)
            row = {"case": name, "kind": kind, **counts(call), "files_visited": names(call)}
            rows.append({**row, "whole": counts(every)})
            print(f"{name:12}{kind:9}{row['calls']:4} calls {row['files']:3} files: {', '.join(names(call))}")
            for _ in range(CACHED_AFTER):
                model(x * 1)
    print(f"appended to {append('visits', {'subject': 'visits of one call', 'rows': rows})}")


if __name__ == "__main__":
    main()
