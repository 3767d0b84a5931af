"""The recorder of experiment results in ActNN's and GACT's benchmarks: one line of JSON per experiment."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


class GlobalExpRecorder:
    """Results of one experiment by name, in `val_dict`."""

    def __init__(self) -> None:
        self.val_dict: dict[str, Any] = {}

    def record(self, key: str, value: Any, float_round: int = 6) -> None:
        """Store a result: floats rounded to `float_round` digits, NumPy numbers as Python numbers."""
        if isinstance(value, np.generic):
            value = value.item()
        self.val_dict[key] = round(value, float_round) if isinstance(value, float) else value

    def dump(self, filename: str | Path) -> None:
        """Append all results to a file as one line."""
        with Path(filename).open("a") as file:
            file.write(json.dumps(self.val_dict) + "\n")
        sys.stdout.write(f"Save exp results to {filename}\n")

    def clear(self) -> None:
        """Delete all results."""
        self.val_dict.clear()


exp_recorder = GlobalExpRecorder()
