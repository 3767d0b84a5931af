"""Packages, metadata and the native extension of mesa-tune.

`search/` and `reports/` are folders at the top level that install as `mesa_tune.search` and
`mesa_tune.reports`. The list of packages is computed here: setuptools finds none by itself once there is an
extension, and would build a wheel of only the library. Without torch, setup builds a pure Python wheel; then
`mesa_tune.ops` warns that its kernels are missing.
"""

import importlib.util
import os
import runpy
import warnings
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
MAPPED = ("search", "reports")
STABLE_ABI = "0x020a000000000000"  # torch 2.10: one build works with this version and every later one
PYTHON_ABI = "cp310"


def packages() -> list[str]:
    """Return every package under its installed name."""
    linked = [f"mesa_tune.{name}" for name in MAPPED]
    excluded = [pattern for name in linked for pattern in (name, f"{name}.*")]
    unmapped = find_packages(str(ROOT), include=["mesa_tune", "mesa_tune.*"], exclude=excluded)
    mapped = find_packages(str(ROOT), include=[pattern for name in MAPPED for pattern in (name, f"{name}.*")])
    return unmapped + [f"mesa_tune.{name}" for name in mapped]


def package_dir() -> dict[str, str]:
    """Return the folders of the packages whose installed name differs from their path."""
    return {f"mesa_tune.{name}": name for name in MAPPED if (ROOT / name / "__init__.py").exists()}


def cuda() -> dict[str, Any] | None:
    """Return the names of csrc/cuda/nvcc.py if there is an nvcc and torch has CUDA; None otherwise."""
    import torch

    nvcc = runpy.run_path(str(ROOT / "csrc" / "cuda" / "nvcc.py"))
    path = None if nvcc["requested"]() == "0" else nvcc["find"]()
    if path is None or torch.version.cuda is not None:
        return nvcc if path else None
    if nvcc["requested"]() == "1":
        warnings.warn(
            "this torch has no CUDA and cannot load CUDA kernels: they are checked, not built", stacklevel=1
        )
        nvcc["check"](path)
    return None


def sources(*patterns: str) -> list[str]:
    """Return the files of csrc/ with names that match."""
    return sorted(str(path.relative_to(ROOT)) for name in patterns for path in (ROOT / "csrc").rglob(name))


def extension() -> dict[str, Any]:
    """Return setup's arguments for the native library; none without torch or without sources."""
    if importlib.util.find_spec("torch") is None or not sources("*.cpp"):
        return {}
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    # C++20: torch 2.10 to 2.12 would compile as C++17. No fused multiply-add: the kernels must give the
    # reference's bytes. No -march: the instruction set is chosen at run time (csrc/cpu/paths.h).
    flags = ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall"]
    stable = f"-DTORCH_TARGET_VERSION={STABLE_ABI}"
    nvcc = cuda()
    library = (CUDAExtension if nvcc else CppExtension)(
        "mesa_tune._C",
        sources("*.cpp", "*.cu") if nvcc else sources("*.cpp"),
        include_dirs=[str(ROOT / "csrc")],
        depends=sources("*.h", "*.cuh"),
        extra_compile_args={
            "cxx": [*flags, stable, *(nvcc["MACROS"] if nvcc else [])],
            "nvcc": [*nvcc["FLAGS"], *nvcc["architectures"](nvcc["find"]())] if nvcc else [],
        },
        py_limited_api=True,
    )
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    return {
        "ext_modules": [library],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": PYTHON_ABI}},
    }


def readme() -> str:
    """Return the text of the README; empty if there is none."""
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


setup(
    name="mesa-tune",
    version="0.1.0",
    description="Measures what a PyTorch model's activations cost, and stores them within a memory budget.",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    install_requires=["torch>=2.10", "numpy", "scipy", "optuna", "pandas", "matplotlib", "typer", "jinja2"],
    extras_require={
        "postgresql": ["psycopg[binary]"],
        "transformers": ["transformers", "accelerate"],
        "lightning": ["lightning"],
        "accelerate": ["accelerate"],
    },
    packages=packages(),
    package_dir=package_dir(),
    package_data={"mesa_tune": ["py.typed", "templates/*"], "mesa_tune.reports": ["templates/*"]},
    entry_points={
        "console_scripts": ["mesa-tune = mesa_tune.cli:main"],
        # Named as its module: pytest then finds `-p mesa_tune.pytest_plugin` and this to be the same.
        "pytest11": ["mesa_tune.pytest_plugin = mesa_tune.pytest_plugin"],
    },
    **extension(),
)
