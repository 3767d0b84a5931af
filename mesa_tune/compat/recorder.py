"""What ActNN's and GACT's benchmarks write down, a line of JSON for each experiment."""

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
        """Notes a result; floats are rounded to `float_round` digits, numpy's numbers become Python's."""
        if isinstance(value, np.generic):
            value = value.item()
        self.val_dict[key] = round(value, float_round) if isinstance(value, float) else value

    def dump(self, filename: str | Path) -> None:
        """Appends a line with all results to a file."""
        with Path(filename).open("a") as file:
            file.write(json.dumps(self.val_dict) + "\n")
        sys.stdout.write(f"Save exp results to {filename}\n")

    def clear(self) -> None:
        """Forgets all results."""
        self.val_dict.clear()


exp_recorder = GlobalExpRecorder()
