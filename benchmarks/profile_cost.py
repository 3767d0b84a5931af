"""What a profile costs its user, in plain training steps of the same model.

    python benchmarks/profile_cost.py [--files examples/digits_vit.py,...] [--fast]

Wall time of `mesa-tune profile FILE` as a process of its own, from its start to its exit, less `ALLOWANCE_S`,
divided by the time of a plain step: the median of a loop in a process that imports nothing of mesa-tune,
before the profile and after it. Results are lines of `results/profile_cost.jsonl`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import RESULTS, ROOT, append

ALLOWANCE_S = 10.0
"""Importing, and what does not depend on the model."""
FILES = (
    *(f"examples/{name}.py" for name in ("digits_vit", "deit_tiny", "gpt2_text", "lora", "resnet")),
    *(f"benchmarks/profile_models/{name}.py" for name in ("llama", "mixer", "t5")),
)
LOOP = """
import runpy, statistics, sys, time
import torch
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
user = runpy.run_path(sys.argv[1])
torch.manual_seed(0)
model, batch = user["model"](), user["batch"](user["BATCH_SIZE"])
make = user.get("optimizer", torch.optim.AdamW)
optimizer = make(list(model.parameters()))
times, end = [], time.monotonic() + 10
while len(times) < 12 or (len(times) < 60 and time.monotonic() < end):
    begin = time.perf_counter()
    optimizer.zero_grad()
    user["loss"](model, batch).backward()
    optimizer.step()
    times.append(time.perf_counter() - begin)
print(statistics.median(times[4:]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--files", default=",".join(FILES))
    parser.add_argument("--fast", action="store_true", help="of `mesa-tune profile --fast`")
    arguments = parser.parse_args()
    for file in arguments.files.split(","):
        before = plain_s(ROOT / file)
        seconds = profile_s(ROOT / file, arguments.fast)
        step = statistics.fmean([before, plain_s(ROOT / file)])
        steps = (seconds - ALLOWANCE_S) / step
        line = {"file": file, "fast": arguments.fast, "step_ms": 1e3 * step, "seconds": seconds}
        append("profile_cost", {**line, "steps": steps})
        print(f"{file}: {seconds:.1f} s; {steps:.0f} plain steps of {1e3 * step:.1f} ms", flush=True)
    print(f"in {RESULTS / 'profile_cost.jsonl'}")


def plain_s(file: Path) -> float:
    """Return the seconds of a plain training step of a model file."""
    command = [sys.executable, "-c", LOOP, str(file)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def profile_s(file: Path, fast: bool) -> float:
    """Return the seconds that the profile of a model file takes, in a process of its own."""
    command = [str(Path(sys.executable).with_name("mesa-tune")), "profile", str(file), "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        subprocess.run([*command, "--run", folder, *["--fast"] * fast], check=True)
        return time.monotonic() - begin


if __name__ == "__main__":
    main()
