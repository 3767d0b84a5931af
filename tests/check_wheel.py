"""Does the wheel work by itself? `make wheel-check` builds one and runs this on it.

    python tests/check_wheel.py dist/mesa_tune-….whl tests/ops/test_ops_kernels.py …

Installed into a fresh folder, and used from there: no source tree, no compiler on PATH, and neither AVX-512
nor AVX2. Then once more without its native library: one warning, and a doctor who says what to do.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USE = "import torch; from mesa_tune import ops; ops.dequantize(ops.quantize(torch.randn(999), 4))"


def main() -> None:
    wheel, *tests = map(Path, sys.argv[1:])
    expect("-cp310-abi3-" in wheel.name, f"{wheel.name} serves every Python from 3.10 on")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        packages = home / "packages"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--target", str(packages), str(wheel)], check=True)
        shutil.copytree(ROOT / "tests", home / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", home)
        check(home, packages, [str(test) for test in tests])


def check(home: Path, packages: Path, tests: Sequence[str]) -> None:
    where = run(home, ["-c", "from mesa_tune import ops; print(ops.LIBRARY, ops.native())"]).stdout.split()
    library = Path(where[0])
    expect(library.is_relative_to(packages) and where[1] == "True", f"{library} is loaded")
    done = run(home, ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests])
    sys.stderr.write(done.stdout if done.returncode else "")
    expect(done.returncode == 0, f"the ops' tests pass: {(done.stdout or done.stderr).splitlines()[-1]}")
    library.unlink()
    warned = run(home, ["-W", "always", "-c", USE])
    expect(warned.returncode == 0, "the ops work without the library")
    expect(warned.stderr.count("UserWarning") == 1 == warned.stderr.count("mesa-tune doctor"), "one warning")
    report = " ".join(run(home, ["-c", "from mesa_tune.cli import main; main()", "doctor"]).stdout.split())
    expect(f"native kernels: {library} was not built" in report, "doctor says what is wrong")
    remedy = report.partition("native kernels")[2].partition("CUDA kernels")[0]
    expect("pip install" in remedy, "and how to mend it")


def run(home: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Python, in a folder that knows only the installed package."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("CXX", "CC", "PYTHONPATH")},
        "PYTHONPATH": str(home / "packages"),
        "PATH": "",
        "ATEN_CPU_CAPABILITY": "default",
    }
    return subprocess.run(
        [sys.executable, *arguments], cwd=home, env=environment, capture_output=True, text=True, check=False
    )


def expect(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"not so: {what}")
    sys.stdout.write(f"ok: {what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
