"""Workloads of transformers' configuration files, for bytes alone: the model is never trained.

What is hard: a configuration does not say what to train. So the class is the one that the file itself names,
or that its model type has for a task; the loss is the class's own, with labels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mesa_tune.errors import WorkloadError
from mesa_tune.workload.workload import DEFAULT_BATCH_SIZE, Workload

PREFIX = "hf:"
_TASKS = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageClassification",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
)
_LONGEST = 1024
_IMAGE_SIZE = 224
_LENGTHS = ("max_position_embeddings", "n_positions", "max_source_positions")


class ConfiguredWorkload(NamedTuple):
    """The workload of a configuration, and what it trains in words: class and size of a sample."""

    workload: Workload
    about: str


def configured(
    path: Path, *, batch_size: int | None = None, length: int | None = None, autocast: str | None = None
) -> ConfiguredWorkload:
    """Return the workload of the configuration at `path`; `length`: tokens per sample, default at most 1024.

    Raise WorkloadError without transformers, for a file that is no configuration, and for a model type that
    has none of the four tasks.
    """
    content = _content(path)
    config = _config(path, content)
    model_class = _model_class(path, config)
    batch, sample = _batches(path, config, model_class.main_input_name, length)
    workload = Workload(
        lambda: model_class(config),
        batch,
        lambda model, given: model(**given).loss,
        batch_size=DEFAULT_BATCH_SIZE if batch_size is None else batch_size,
        autocast=None if autocast == "none" else autocast,
        fingerprint=hashlib.sha256(content).hexdigest(),
    )
    return ConfiguredWorkload(workload, f"{model_class.__name__} on {sample}")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}\nname a config.json") from error


def _config(path: Path, content: bytes) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError:
        raise WorkloadError(
            f"{PREFIX}{path}: needs transformers\ninstall it: pip install transformers"
        ) from None
    remedy = "name a configuration file of transformers (config.json)"
    try:
        values = json.loads(content)
        model_type = values.pop("model_type")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise WorkloadError(f"{path}: is no JSON object with a `model_type`\n{remedy}") from None
    try:
        config = AutoConfig.for_model(model_type, **values)
    except ValueError as error:
        raise WorkloadError(f"{path}: {str(error).splitlines()[0]}\n{remedy}") from error
    if getattr(config, "is_encoder_decoder", False) and not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = 0
    config.use_cache = False  # for generation
    return config


def _model_class(path: Path, config: Any) -> Any:
    """Return the class that the configuration names, or the first of the four tasks that its type has."""
    import transformers

    mappings = [getattr(transformers, task)._model_mapping for task in _TASKS]
    classes = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    classes = [entry[0] if isinstance(entry, tuple) else entry for entry in classes]
    if not classes:
        raise WorkloadError(
            f"{path}: model type {config.model_type!r} has no class for any of {len(_TASKS)} tasks\n"
            "write a model.py for it: `mesa-tune init`"
        )
    named = [each for each in classes if each.__name__ in (config.architectures or ())]
    return (named or classes)[0]


def _batches(
    path: Path, config: Any, main_input: str, length: int | None
) -> tuple[Callable[[int], dict[str, Any]], str]:
    """Return a function that makes a batch, and a sample in words."""
    if main_input == "input_ids":
        return _texts(config, length)
    if main_input == "pixel_values" and length is None:
        return _images(config)
    what = "images have no --length" if length else f"cannot make batches of {main_input}"
    raise WorkloadError(f"{path}: {what}\nwrite a model.py for other inputs: `mesa-tune init`")


def _texts(config: Any, length: int | None) -> tuple[Callable[[int], dict[str, Any]], str]:
    known = [getattr(config, name) for name in _LENGTHS if getattr(config, name, None)]
    tokens = min([_LONGEST, *known[:1]]) if length is None else length

    def batch(count: int) -> dict[str, Any]:
        ids = torch.randint(config.vocab_size, (count, tokens))
        return {"input_ids": ids, "labels": ids}

    return batch, f"{tokens} tokens"


def _images(config: Any) -> tuple[Callable[[int], dict[str, Any]], str]:
    size = getattr(config, "image_size", None) or _IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(config, "num_channels", 3)

    def batch(count: int) -> dict[str, Any]:
        pixels = torch.randn(count, channels, height, width)
        return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (count,))}

    return batch, f"images of {height} x {width}"
