"""Tiny models of every model type of transformers: the configuration, the class with a loss, and a batch.

Weights and batches are random: nothing is downloaded. A model type is tried with its task heads in the order
of `HEADS`; the first that gives a finite loss with gradients is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from benchmarks.sweeps import steps
from benchmarks.sweeps.batches import FORMS, IMAGES, Batch, Batcher
from benchmarks.sweeps.shrinking import OVERRIDES, TOO_LARGE, shrunken

# transformers' own tables of task heads, those with the most of the model under the loss first.
HEADS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_UNIVERSAL_SEGMENTATION",
    "MODEL_FOR_INSTANCE_SEGMENTATION",
    "MODEL_FOR_OBJECT_DETECTION", "MODEL_FOR_SEMANTIC_SEGMENTATION", "MODEL_FOR_DEPTH_ESTIMATION",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_CTC", "MODEL_FOR_AUDIO_CLASSIFICATION",
    "MODEL_FOR_VIDEO_CLASSIFICATION", "MODEL_FOR_PRETRAINING", "MODEL_FOR_QUESTION_ANSWERING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION", "MODEL_FOR_TOKEN_CLASSIFICATION", "MODEL_FOR_MASKED_IMAGE_MODELING",
    "MODEL_FOR_TIME_SERIES_PREDICTION", "MODEL_FOR_VISUAL_QUESTION_ANSWERING", "MODEL_FOR_MULTIMODAL_LM",
    "MODEL_FOR_TEXT_TO_SPECTROGRAM", "MODEL_FOR_IMAGE_TO_IMAGE", "MODEL_FOR_IMAGE_MATTING",
    "MODEL_FOR_MULTIPLE_CHOICE", "MODEL_FOR_RETRIEVAL", "MODEL_FOR_RNNT", "MODEL_FOR_TDT", "MODEL",
    "MODEL_FOR_BACKBONE", "MODEL_FOR_POSE_ESTIMATION", "MODEL_FOR_MASK_GENERATION",
    "MODEL_FOR_KEYPOINT_DETECTION", "MODEL_FOR_KEYPOINT_MATCHING", "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION",
    "MODEL_FOR_TEXT_RECOGNITION", "MODEL_FOR_TABLE_RECOGNITION", "MODEL_FOR_TEXT_TO_WAVEFORM",
    "MODEL_FOR_NORMAL_ESTIMATION", "MODEL_FOR_POINTMAP_ESTIMATION", "MODEL_FOR_IMAGE",
    "MODEL_FOR_TEXT_ENCODING",
)  # fmt: skip


class Architecture(NamedTuple):
    """A model type with the class that is trained, how to build it tiny, and the batch that it takes."""

    model_type: str
    head: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The model's own loss, or the squared distance of its outputs from random ones."""
        return loss_of(model(**batch))


class NotBuiltError(ValueError):
    """No class of a model type gives a loss; says why for each."""


FAILURES = (*steps.FAILURES, ImportError, OSError, StrictDataclassError)
"""What models and configurations raise where something does not fit."""


def model_types() -> list[str]:
    """All that transformers knows, in its order."""
    return list(CONFIG_MAPPING)


def heads_of(model_type: str) -> list[str]:
    """Names of the classes for `model_type`, the one that is tried first at the front."""
    found: list[str] = []
    for head in HEADS:
        names = getattr(modeling_auto, f"{head}_MAPPING_NAMES").get(model_type, ())
        found += [names] if isinstance(names, str) else list(names)
    return list(dict.fromkeys(found))


def tiny_config(model_type: str) -> Any:
    """The configuration of `model_type` with every size shrunk."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**merged(shrunken(kind()), OVERRIDES.get(model_type, {})))


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the second's values where both have one; dicts inside are merged likewise."""
    both = dict(first)
    for name, value in second.items():
        old = both.get(name)
        both[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output, or the squared distance of the floats in it from random ones."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss if loss.numel() == 1 else loss.mean()
    found = [each.float() for each in _floats(output) if each.requires_grad]
    if not found:
        raise NotBuiltError("no output has a gradient")
    # Squares alone would have next to no gradient behind a norm, whose outputs all have the same length.
    chance = torch.Generator().manual_seed(0)
    return torch.stack(
        [(each - torch.randn(each.shape, generator=chance)).square().mean() for each in found]
    ).sum()


def _floats(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from _floats(each)
    elif isinstance(output, (list, tuple)):
        for each in output:
            yield from _floats(each)


def architecture(model_type: str) -> Architecture:
    """The tiny model of `model_type`.

    Raises:
        NotBuiltError: no class of it can be built, fed, and gives a finite loss with gradients.
    """
    if model_type in TOO_LARGE:
        raise NotBuiltError("more than 10 million parameters")
    why = []
    for head in heads_of(model_type):
        found = _fed(model_type, head)
        if isinstance(found, Architecture):
            return found
        why.append(f"{head}: {found}")
    raise NotBuiltError("\n".join(why) or "no model class of its own")


def _fed(model_type: str, head: str) -> Architecture | str:
    """The class with the first form of a batch that it takes, or what is wrong with the first form."""
    build, why = _builder(model_type, head), []
    try:
        build()
        for form in _forms(model_type, head):
            made = Architecture(model_type, head, build, _batcher(model_type, head, form))
            try:
                trial(made)
            except FAILURES as error:
                why.append(f"{form}: {type(error).__name__}: {error}")
            else:
                return made
    except FAILURES as error:
        why.append(f"{type(error).__name__}: {error}")
    return " | ".join(why)


def trial(made: Architecture) -> None:
    torch.manual_seed(0)
    model, batch = made.build(), made.batch()
    torch.manual_seed(1)
    loss = made.loss(model, batch)
    if not torch.isfinite(loss):
        raise NotBuiltError(f"loss {loss}")
    loss.backward()


def _forms(model_type: str, head: str) -> tuple[str, ...]:
    """The ways to feed this class: with images among the text first, where it takes both."""
    parameters = inspect.signature(getattr(transformers, head).forward).parameters
    fields = vars(CONFIG_MAPPING[model_type]())
    mixed = {"input_ids", "pixel_values"} <= parameters.keys() and {
        "image_token_id",
        "image_token_index",
    } & fields.keys()
    return (*IMAGES, *FORMS) if mixed else FORMS


def _builder(model_type: str, head: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = tiny_config(model_type)
        for part in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
            if part is not None and hasattr(part, "use_cache"):
                part.use_cache = False
        model: nn.Module = getattr(transformers, head)(config)
        return model.float().train()

    return build


def _batcher(model_type: str, head: str, form: str) -> Callable[[], Batch]:
    return lambda: Batcher(tiny_config(model_type), getattr(transformers, head), form).batch()
