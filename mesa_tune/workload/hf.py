"""Workloads of transformers' configurations, for bytes alone: the model is never trained.

What is hard: a configuration does not say what to train. So the class is the one that the file itself names,
or that its model type has for a task; the loss is the class's own, with labels.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from mesa_tune.errors import WorkloadError
from mesa_tune.workload.workload import DEFAULT_BATCH_SIZE, Workload

PREFIX = "hf:"
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+(?<!\.json)")
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
    name: str,
    *,
    batch_size: int | None = None,
    length: int | None = None,
    autocast: str | None = None,
    lora: int | None = None,
) -> ConfiguredWorkload:
    """Return the workload of the configuration `name`; `length`: tokens per sample, default at most 1024.

    `name`: a file, a folder with a `config.json`, or `org/name` on the hub, of which transformers may have a
    copy. Code that such a model brings along is never run. `lora`: rank of adapters on all linear layers; all
    else is frozen, in the dtype that the configuration names.

    Raise WorkloadError without transformers, for what is no configuration, and for a model type that has none
    of the four tasks.
    """
    config = _config(name)
    model_class = _model_class(name, config)
    batch, tokens, sample = _batches(name, config, model_class.main_input_name, length)
    about = f"{model_class.__name__} on {sample}"
    make: Callable[[], nn.Module] = partial(model_class, config)
    if lora is not None:
        make, about = _adapted(make, config, lora), f"LoRA adapters of rank {lora} on {about}"
    workload = Workload(
        make,
        batch,
        lambda model, given: model(**given).loss,
        batch_size=DEFAULT_BATCH_SIZE if batch_size is None else batch_size,
        autocast=None if autocast == "none" else autocast,
        length=tokens,
        fingerprint=hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest(),
    )
    return ConfiguredWorkload(workload, about)


def _adapted(make: Callable[[], nn.Module], config: Any, rank: int) -> Callable[[], nn.Module]:
    """Return what makes the model with adapters. Raise WorkloadError without PEFT."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise WorkloadError("--lora: needs PEFT\ninstall it: pip install peft") from None

    def adapted() -> nn.Module:
        model = make()
        if isinstance(config.dtype, torch.dtype):
            model = model.to(config.dtype)
        return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))

    return adapted


def _config(name: str) -> Any:
    """Return the configuration. Only of what is neither file nor folder does transformers ask the hub."""
    try:
        import transformers
    except ImportError:
        raise WorkloadError(
            f"{PREFIX}{name}: needs transformers\ninstall it: pip install transformers"
        ) from None
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    on_hub = _ON_HUB.fullmatch(name) and not path.exists()
    config = _from_hub(transformers.AutoConfig, name) if on_hub else _from_file(transformers.AutoConfig, path)
    if getattr(config, "is_encoder_decoder", False) and not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = 0
    config.use_cache = False  # for generation
    return config


def _from_hub(kind: Any, name: str) -> Any:
    try:
        return kind.from_pretrained(name, trust_remote_code=False)
    except OSError as error:
        raise WorkloadError(
            f"{PREFIX}{name}: no folder here, and no config.json in transformers' cache or on the hub\n"
            f"{' '.join(str(error).split())[:160]}\n"
            "where there is a network: `hf download` it; or name a config.json, or a folder with one"
        ) from error
    except ValueError as error:
        raise WorkloadError(
            f"{PREFIX}{name}: {str(error).splitlines()[0]}\n"
            "code that a model brings along is never run: write a model.py for it, `mesa-tune init`"
        ) from error


def _from_file(kind: Any, path: Path) -> Any:
    remedy = "name a config.json of transformers, a folder with one, or org/name"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}\n{remedy}") from error
    try:
        values = json.loads(content)
        model_type = values.pop("model_type")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise WorkloadError(f"{path}: is no JSON object with a `model_type`\n{remedy}") from None
    try:
        return kind.for_model(model_type, **values)
    except ValueError as error:
        raise WorkloadError(f"{path}: {str(error).splitlines()[0]}\n{remedy}") from error


def _model_class(name: str, config: Any) -> Any:
    """Return the class that the configuration names, or the first of the four tasks that its type has."""
    import transformers

    mappings = [getattr(transformers, task)._model_mapping for task in _TASKS]
    classes = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    classes = [entry[0] if isinstance(entry, tuple) else entry for entry in classes]
    if not classes:
        raise WorkloadError(
            f"{PREFIX}{name}: model type {config.model_type!r} has no class for any of {len(_TASKS)} tasks\n"
            "write a model.py for it: `mesa-tune init`"
        )
    named = [each for each in classes if each.__name__ in (config.architectures or ())]
    return (named or classes)[0]


def _batches(
    name: str, config: Any, main_input: str, length: int | None
) -> tuple[Callable[..., dict[str, Any]], int | None, str]:
    """Return a function that makes a batch, the length of texts, and a sample in words."""
    if main_input == "input_ids":
        return _texts(config, length)
    if main_input == "pixel_values" and length is None:
        return _images(config)
    what = "images have no --length" if length else f"cannot make batches of {main_input}"
    raise WorkloadError(f"{PREFIX}{name}: {what}\nwrite a model.py for other inputs: `mesa-tune init`")


def _texts(config: Any, length: int | None) -> tuple[Callable[..., dict[str, Any]], int, str]:
    known = [getattr(config, name) for name in _LENGTHS if getattr(config, name, None)]
    tokens = min([_LONGEST, *known[:1]]) if length is None else length

    def batch(count: int, tokens: int) -> dict[str, Any]:
        ids = torch.randint(config.vocab_size, (count, tokens))
        return {"input_ids": ids, "labels": ids}

    return batch, tokens, f"{tokens} tokens"


def _images(config: Any) -> tuple[Callable[..., dict[str, Any]], None, str]:
    size = getattr(config, "image_size", None) or _IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(config, "num_channels", 3)

    def batch(count: int) -> dict[str, Any]:
        pixels = torch.randn(count, channels, height, width)
        return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (count,))}

    return batch, None, f"images of {height} x {width}"
