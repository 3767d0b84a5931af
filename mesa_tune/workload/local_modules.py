"""The local modules that a model file imports: found without running them, read once, run from what was read.

Local is what lies in the folder of the model file, which is on the import path while the file runs; packages
that are installed elsewhere and the standard library are not.

What is hard: the fingerprint of a model must tell whether the code is the code that was profiled. Imports
inside functions run long after the file, and a module that an earlier model file imported is not run again.
So a finder serves the bytes that were hashed, and modules of other bytes are forgotten.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import SOURCE_SUFFIXES, ModuleSpec, SourceFileLoader, all_suffixes
from importlib.util import resolve_name, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class LocalModule(NamedTuple):
    """File and content of a module."""

    file: Path
    content: bytes

    @property
    def is_package(self) -> bool:
        return self.file.stem == "__init__"

    @property
    def is_source(self) -> bool:
        return self.file.suffix in SOURCE_SUFFIXES


def find_local_modules(folder: Path, content: bytes) -> dict[str, LocalModule]:
    """Return by name the modules in `folder` that Python source `content` imports, also through each other.

    Imports inside functions count, those by `importlib` do not. Source that is no Python imports nothing.
    """
    modules: dict[str, LocalModule] = {}
    waiting = [(content, "")]
    while waiting:
        for imported in _imported(*waiting.pop()):
            for name, file in _files(folder, imported):
                if name not in modules and (data := _content(file)) is not None:
                    module = modules[name] = LocalModule(file, data)
                    if module.is_source:
                        waiting.append((data, name if module.is_package else name.rpartition(".")[0]))
    return dict(sorted(modules.items()))


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Yield what the source of a module in `package` may import, by full name; some may be no modules."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                base = resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:
                continue  # beyond the topmost package: importing it fails, too
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _files(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Yield the modules in `folder` that an import of `name` runs, packages first, with their files."""
    parts = name.split(".")
    for end, part in enumerate(parts, 1):
        candidates = (
            folder / part / "__init__.py",
            *(folder / f"{part}{suffix}" for suffix in all_suffixes()),
        )
        file = next((file for file in candidates if file.is_file()), None)
        if file is not None:
            yield ".".join(parts[:end]), file
        folder /= part


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None  # importing it fails, too, and the error is then about this file


class _Loader(SourceFileLoader):
    """Loader of a module from the content that was read, without bytecode files."""

    def __init__(self, name: str, module: LocalModule) -> None:
        super().__init__(name, str(module.file))
        self.module = module

    def get_data(self, path: str) -> bytes:
        return self.module.content if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> Mapping[str, int]:
        raise OSError("no bytecode: it could be that of other content")


class _Finder(MetaPathFinder):
    """Finder of the modules that model files import."""

    def __init__(self) -> None:
        self.modules: dict[str, LocalModule] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = self.modules.get(fullname)
        if module is None:
            return None
        locations = [str(module.file.parent)] if module.is_package else None
        loader = _Loader(fullname, module)
        return spec_from_file_location(
            fullname, module.file, loader=loader, submodule_search_locations=locations
        )


_finder = _Finder()


def serve(modules: Mapping[str, LocalModule]) -> None:
    """Make imports of `modules` run their content as it was read.

    If one of them was run before with other content, all modules that were served before are forgotten: they
    may refer to each other.
    """
    sources = {name: module for name, module in modules.items() if module.is_source}
    if any(_finder.modules.get(name, module) != module for name, module in sources.items()):
        for name in _finder.modules:
            if isinstance(getattr(sys.modules.get(name), "__loader__", None), _Loader):
                del sys.modules[name]
        _finder.modules.clear()
    _finder.modules.update(sources)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
