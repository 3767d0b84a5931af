"""Which nvcc compiles the CUDA kernels, and how. Run as a program, it checks them, without a GPU.

    python csrc/cuda/nvcc.py

Every kernel must compile for every architecture with no warning and no register spilled to memory. Takes
torch's headers of any build. Without nvcc it says so and checks nothing; with MESA_TUNE_CUDA=1 it fails.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent
ARCHITECTURES = (80, 90)
# No fused multiply-add: the kernels give the CPU's bytes.
FLAGS = ["-O3", "-std=c++17", "-fmad=false", "--expt-relaxed-constexpr"]
MACROS = ["-DMESA_TUNE_CUDA", "-DUSE_CUDA"]  # ours, and the one that torch's headers ask for


def wanted() -> str:
    """`MESA_TUNE_CUDA`: `1` insists on CUDA kernels, `0` leaves them out; else where they can be built."""
    return os.environ.get("MESA_TUNE_CUDA", "")


def find() -> str | None:
    """The path of nvcc: in CUDA_HOME, on PATH, or where its installer puts it. Exits if it must be there."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [*(f"{home}/bin" for home in homes if home), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None and wanted() == "1":
        sys.exit(
            "MESA_TUNE_CUDA=1 asks for CUDA kernels, but there is no nvcc:"
            " install the CUDA toolkit, or name its folder in CUDA_HOME."
        )
    return nvcc


def architectures() -> list[str]:
    """nvcc's options for machine code of each architecture, and PTX of the last for those to come."""
    codes = {number: f"sm_{number}" for number in ARCHITECTURES}
    codes[ARCHITECTURES[-1]] = f"[sm_{ARCHITECTURES[-1]},compute_{ARCHITECTURES[-1]}]"
    return [f"-gencode=arch=compute_{number},code={code}" for number, code in codes.items()]


def check(nvcc: str) -> None:
    """Exits with what is wrong unless every kernel compiles without warnings and spills."""
    for source in sorted(CSRC.rglob("*.cu")):
        output = compiled([nvcc, *FLAGS, *architectures(), "-Xptxas=-v", "-Werror=all-warnings"], source)
        found = re.findall(r"Function properties for (\S+)\n.* (\d+) bytes spill stores, (\d+) bytes", output)
        spilling = [name for name, *spilled in found if spilled != ["0", "0"]]
        if spilling or not found:
            sys.exit(f"{source}: kernels spill registers: {spilling}\n{output}")
        print(f"{source.name}: {len(found)} kernels for {ARCHITECTURES}, none spills")
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
    compiled([os.environ.get("CXX", "c++"), *flags], CSRC / "quantize.cpp")
    print("quantize.cpp: compiles with CUDA")


def compiled(command: list[str], source: Path) -> str:
    """What the compiler says; exits with it if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*command, f"-I{CSRC}", "-c", str(source), "-o", str(Path(folder, "out.o"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main() -> None:
    nvcc = find()
    if nvcc is None:
        print("no nvcc on this machine: the CUDA kernels were not compiled")
    else:
        check(nvcc)


if __name__ == "__main__":
    main()
