"""What `mesa-tune init --from` recorded of a script: the model and batches, in files beside the model file.

What is hard: the pickle of a model names its classes, and a script's own classes are those of `__main__`. The
model file has copies of them, so they are looked up there.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from mesa_tune.errors import WorkloadError
from mesa_tune.workload.instance.given_batches import GivenBatches

SCRIPT = "__main__"
BATCHES, VALUES = "batches", "values"
"""Keys in the file of the batches: these, and the values of global names that the script's classes use."""


class Recorded:
    """The recorded model and batches of the model file whose global names are `names`.

    `model`, `batches`: names of the files beside it. `digest`: the start of the SHA-256 of both. Raise
    WorkloadError for files that are missing or were recorded at another time.
    """

    def __init__(self, names: dict[str, Any], model: str, batches: str, digest: str) -> None:
        folder = Path(names["__file__"]).parent
        self._names, self._model, self._batches = names, folder / model, folder / batches
        missing = [path for path in (self._model, self._batches) if not path.is_file()]
        if missing:
            raise self._error(f"{missing[0]}: no such file")
        if not digest_of(self._model, self._batches).startswith(digest):
            raise self._error(f"{self._model} or {self._batches}: not those that were recorded for this file")
        data = self._load(self._batches)
        names.update(data[VALUES])
        self.batches = GivenBatches(iter(data[BATCHES]))

    def model(self) -> nn.Module:
        """Return the model as it was recorded, on the CPU."""
        model: nn.Module = self._load(self._model)
        return model

    def _load(self, path: Path) -> Any:
        return torch.load(path, "cpu", _pickle_with(self._names), weights_only=False)

    def _error(self, what: str) -> WorkloadError:
        return WorkloadError(
            f"{what}\nrecord the script again: mesa-tune init {self._names['__file__']} --from SCRIPT --force"
        )


def digest_of(*paths: Path) -> str:
    """Return the SHA-256 of the content of files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _pickle_with(names: Mapping[str, Any]) -> SimpleNamespace:
    """Return a pickle module for `torch.load` that finds the classes of a script in `names`."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return names[name] if module == SCRIPT else super().find_class(module, name)

    return SimpleNamespace(__name__=pickle.__name__, Unpickler=Unpickler, load=pickle.load)
