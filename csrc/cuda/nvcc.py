"""Find nvcc, and define its options for the CUDA kernels. As a program, check the kernels; needs no GPU.

    python csrc/cuda/nvcc.py

Every kernel must compile for every architecture without a warning and without spilled registers. The headers
of any build of torch will do. Without nvcc it says so and checks nothing; with MESA_TUNE_CUDA=1 it fails.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent
ARCHITECTURES = (75, 80, 90, 100, 120)  # of these, those that nvcc knows
# No fused multiply - add : the kernels must give the CPU's bytes.
FLAGS = ["-O3", "-std=c++17", "-fmad=false", "--expt-relaxed-constexpr"]
MACROS = ["-DMESA_TUNE_CUDA", "-DUSE_CUDA"]  # that of mesa-tune, and the one that torch's headers test
SPILLS = r"Function properties for (\S+)\n.* (\d+) bytes spill stores, (\d+) bytes"  # per kernel, from ptxas


def requested() -> str:
    """Return `MESA_TUNE_CUDA`: `1` requires CUDA kernels, `0` omits them, else they are built if possible."""
    return os.environ.get("MESA_TUNE_CUDA", "")


def find() -> str | None:
    """Return the path of nvcc: in CUDA_HOME, on PATH, or in its default folder. Exit if it is required."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [*(f"{home}/bin" for home in homes if home), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None and requested() == "1":
        sys.exit(
            "MESA_TUNE_CUDA=1 asks for CUDA kernels, but there is no nvcc:"
            " install the CUDA toolkit, or name its folder in CUDA_HOME."
        )
    return nvcc


def known(nvcc: str) -> list[int]:
    """Return those of `ARCHITECTURES` that this nvcc compiles for."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    return [number for number in ARCHITECTURES if f"compute_{number}" in listed.split()]


def architectures(nvcc: str) -> list[str]:
    """Return nvcc's options for machine code of each architecture, and for PTX for later architectures."""
    numbers = known(nvcc)
    codes = {number: f"sm_{number}" for number in numbers}
    codes[numbers[-1]] = f"[sm_{numbers[-1]},compute_{numbers[-1]}]"
    return [f"-gencode=arch=compute_{number},code={code}" for number, code in codes.items()]


def check(nvcc: str) -> None:
    """Compile every kernel; exit with the output of the compiler if it warns or spills registers."""
    numbers, targets = known(nvcc), architectures(nvcc)
    sources = sorted(CSRC.rglob("*.cu"), reverse=True)  # so that the one which takes longest comes early
    command = [nvcc, *FLAGS, *targets, "-Xptxas=-v", "-Werror=all-warnings"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for source, output in zip(sources, pool.map(partial(run, command), sources), strict=True):
            kernels = re.findall(SPILLS, output)
            spilling = [name for name, *spilled in kernels if spilled != ["0", "0"]]
            if spilling or not kernels:
                sys.exit(f"{source}: kernels spill registers: {spilling}\n{output}")
            print(f"{source.name}: {len(kernels)} kernels for {numbers}, none spills", flush=True)
    from torch.utils.cpp_extension import include_paths

    includes = [f"-I{path}" for path in include_paths()]
    flags = [
        "-std=c++20",
        "-Wall",
        "-Werror",
        *MACROS,
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        *includes,
    ]
    for source in sorted(path for path in CSRC.glob("*.cpp") if "MESA_TUNE_CUDA" in path.read_text("utf-8")):
        run([os.environ.get("CXX", "c++"), *flags], source)
        print(f"{source.name}: compiles with CUDA")


def run(command: list[str], source: Path) -> str:
    """Run a compiler on `source` and return its output; exit with the output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*command, f"-I{CSRC}", "-c", str(source), "-o", str(Path(folder, "out.o"))]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def main() -> None:
    nvcc = find()
    if nvcc is None:
        print("no nvcc on this machine: the CUDA kernels were not compiled")
    else:
        check(nvcc)


if __name__ == "__main__":
    main()
