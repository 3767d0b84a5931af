"""Start what watches a script. A copy of this file, named `sitecustomize.py`, runs when Python starts.

What is hard: this runs in every Python process of the command, launchers and workers of data loaders too, and
perhaps before a `sitecustomize` of the user's own. So it imports nothing but the standard library, runs the
one that it hides, and waits for a first forward with gradients.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

FOLDER, SETTINGS = Path(__file__).parent, "settings.json"
"""The folder that a command and its script share, and what the command asks for. `starts`: the module whose
`start` is called with the folder, and the module that is called.
"""


class AfterTorch(MetaPathFinder):
    """Finder that runs `wait_for_forward` when torch has been imported."""

    asking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return torch's own spec, whose loader then calls `wait_for_forward`; None for other modules."""
        if name != "torch" or self.asking:
            return None
        self.asking = True
        try:
            spec = find_spec(name)
        finally:
            self.asking = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                loader.__dict__.pop("exec_module", None)
                sys.meta_path.remove(self)
                wait_for_forward()

            loader.exec_module = exec_module
        return spec


def wait_for_forward() -> None:
    """Start what the settings name when a module is first called with gradients."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    def begin(module: Any, _: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        handle.remove()
        try:
            starts = json.loads((FOLDER / SETTINGS).read_text("utf-8"))["starts"]
            start = import_module(starts).start
        except ImportError as error:
            fault = (
                f"the script's Python ({sys.executable}) cannot import mesa_tune: {error}\ninstall it there"
            )
            (FOLDER / "fault.txt").write_text(fault, encoding="utf-8")
        else:
            start(FOLDER, module)

    handle = register_module_forward_pre_hook(begin)


def run_hidden() -> None:
    """Run the `sitecustomize` that this one hides, and take this folder off the path."""
    sys.path[:] = [entry for entry in sys.path if entry != str(FOLDER)]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, AfterTorch())
    run_hidden()
