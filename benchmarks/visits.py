"""How many of mesa-tune's Python functions and files does one forward of a converted layer enter?

    python benchmarks/visits.py

Planned: the layer's first call. Cached: a later call like it.
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


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(256, 256), (128, 256)),
    "layer norm": (lambda: nn.LayerNorm(256), (128, 256)),
    "GELU": (nn.GELU, (128, 256)),
    "attention": (SelfAttention, (4, 4, 64, 32)),
}


def visits(run: Callable[[], Any]) -> dict[str, int]:
    """Count the calls of mesa-tune's functions during `run`, their files, and the switches between files."""
    files: list[str] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            files.append(frame.f_code.co_filename)

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    switches = sum(before != after for before, after in pairwise(files))
    return {"calls": len(files), "files": len(set(files)), "switches": switches}


def main() -> None:
    rows = []
    for name, (make, shape) in CASES.items():
        x = torch.randn(shape, requires_grad=True)
        model = mt.convert(make(), mt.Policy.uniform(level=16))
        for kind in ("planned", "cached"):
            row = {"case": name, "kind": kind, **visits(lambda model=model, x=x * 1: model(x))}
            rows.append(row)
            print(
                f"{name:12}{kind:9}{row['calls']:4} calls {row['files']:3} files {row['switches']:4} switches"
            )
            for _ in range(CACHED_AFTER):
                model(x * 1)
    print(f"appended to {append('visits', {'subject': 'visits of one forward', 'rows': rows})}")


if __name__ == "__main__":
    main()
