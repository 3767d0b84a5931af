"""Random batches for models of transformers, made from the names of what their forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.sweeps.shrinking import IMAGE, TOKENS

BATCH = 4
SOUND = 8000  # samples of a sound
FRAMES = 96  # of a spectrogram
OBJECTS = 2
GRID = (1, 8, 8)  # patches of an image in time, height and width

Batch = dict[str, Any]

IMAGES = tuple(f"images {tokens}" for tokens in (64, 16, 4))
FORMS = ("whole", "plain", "text", "long", "sequence")
"""Ways to feed a model: all that it takes, without a mask, text only, features as long as they may be, and
with an axis of their own. `IMAGES`: text with so many tokens for each image."""

_OPTIONAL = {"input_ids", "pixel_values", "input_features", "input_values", "attention_mask", "bbox"}
_WITH_GRID = {"grid_thw", "image_grid_thw", "image_grid_hw"}
_VIDEO = ("ideo", "imesformer", "Vivit", "XCLIP", "Tvp")


class NotFedError(ValueError):
    """A forward takes what nothing here makes."""


class Batcher:
    """Makes what the forward of `kind` takes, at the sizes of `config`, in one of `FORMS`."""

    def __init__(self, config: Any, kind: type[Any], form: str) -> None:
        self.config = config
        self.name = kind.__name__
        self.form = form
        self.images = int(form.split()[1]) if form in IMAGES else 0
        self.main = getattr(kind, "main_input_name", None)
        self.parameters = dict(inspect.signature(kind.forward).parameters)
        self.text = self._part("text_config", "language_config", "decoder") or config
        self.vision = self._part("vision_config", "image_config", "backbone_config", "encoder") or config
        sounds = ("audio_config", "speech_config", "encoder_config", "audio_encoder_config")
        self.audio = self._part(*sounds) or config

    def batch(self) -> Batch:
        """One batch, with labels where the forward takes them."""
        made: Batch = {}
        for name, parameter in self.parameters.items():
            if name != "self" and self._wants(name, parameter):
                value = self._made(name)
                if value is not None:
                    made[name] = value
        return made | self._labels(made)

    def _wants(self, name: str, parameter: inspect.Parameter) -> bool:
        needed = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if self.form == "text":
            return name in {"input_ids", "attention_mask"}
        if name == "attention_mask" and self.form == "plain":
            return False
        if self.form in IMAGES and name in _WITH_GRID:
            return True
        return needed or name == self.main or name in _OPTIONAL or (self.form != "plain" and name in _EXTRAS)

    def _made(self, name: str) -> Any:
        if name in _SIMPLE:
            return _SIMPLE[name](self)
        maker = getattr(self, f"_{name}", None)
        if maker is None:
            raise NotFedError(f"nothing makes `{name}`")
        return maker()

    def _part(self, *names: str) -> Any:
        parts = (getattr(self.config, name, None) for name in names)
        return next((part for part in parts if hasattr(part, "model_type")), None)

    def _size(self, part: Any, *names: str, default: int) -> int:
        """The first of these sizes that the part of the configuration has, or else the whole."""
        values = (getattr(where, name, None) for where in (part, self.config) for name in names)
        return next((value for value in values if isinstance(value, int) and value), default)

    # Text.

    def _length(self) -> int:
        names = ("max_position_embeddings", "n_positions", "max_target_positions")
        return min(TOKENS, max(8, self._size(self.text, *names, default=TOKENS)))

    def _ids(self, length: int) -> Tensor:
        vocabulary = self._size(self.text, "vocab_size", "num_tokens", default=256)
        return torch.randint(min(110, vocabulary // 2), vocabulary, (BATCH, length))

    def _input_ids(self) -> Tensor:
        ids = self._ids(self._length() + self.images)
        if self.images:
            token = self._size(self.config, "image_token_id", "image_token_index", default=0)
            ids[:, 2 : 2 + self.images] = token
        return ids

    def _attention_mask(self) -> Tensor | None:
        if "input_ids" not in self.parameters:
            has_frames = "input_features" in self.parameters and self.form != "long"
            return torch.ones(BATCH, FRAMES, dtype=torch.long) if has_frames else None
        length = self._length() + self.images
        mask = torch.ones(BATCH, length, dtype=torch.long)
        mask[0, -length // 4 :] = 0
        return mask

    def _bbox(self) -> Tensor:
        corner = torch.randint(0, 100, (BATCH, self._length(), 2))
        return torch.cat([corner, corner + torch.randint(1, 20, corner.shape)], -1)

    def _hidden(self, length: int = TOKENS) -> Tensor:
        return torch.randn(BATCH, length, self._size(self.text, "hidden_size", "d_model", default=64))

    # Images.

    def _sides(self) -> tuple[int, int]:
        names = ("image_size", "img_size")
        values = (getattr(where, name, None) for where in (self.vision, self.config) for name in names)
        size: Any = next((value for value in values if isinstance(value, (int, list, tuple))), IMAGE)
        return (size, size) if isinstance(size, int) else (size[0], size[-1])

    def _channels(self) -> int:
        return self._size(self.vision, "num_channels", "in_channels", "in_chans", default=3)

    def _patches(self) -> Tensor:
        frames = self._size(self.vision, "temporal_patch_size", "patch_temporal", default=1)
        side = self._size(self.vision, "patch_size", default=8)
        return torch.randn(BATCH * GRID[0] * GRID[1] * GRID[2], self._channels() * frames * side * side)

    def _flattened_patches(self) -> Tensor:
        places = torch.cartesian_prod(torch.arange(1, 9), torch.arange(1, 9)).expand(BATCH, -1, -1)
        return torch.cat([places, torch.randn(BATCH, 64, 3 * 16 * 16)], -1)

    def _hidden_states(self) -> Tensor:
        return self._patches() if _WITH_GRID & self.parameters.keys() else self._hidden()

    def _pixel_values(self) -> Tensor | None:
        if _WITH_GRID & self.parameters.keys():
            return self._patches() if self.images or "input_ids" not in self.parameters else None
        frames = self._size(self.vision, "num_frames", default=0)
        if frames and (self.form == "sequence" or any(word in self.name for word in _VIDEO)):
            return torch.randn(BATCH, frames, self._channels(), *self._sides())
        lead = (BATCH, 1) if self.form == "sequence" else (BATCH,)
        return torch.randn(*lead, self._channels(), *self._sides())

    def _pixel_values_videos(self) -> Tensor | None:
        if "input_ids" in self.parameters and self.main != "pixel_values_videos":
            return None
        frames = self._size(self.vision, "num_frames", "frames_per_clip", default=4)
        return torch.randn(BATCH, frames, self._channels(), *self._sides())

    # Sounds.

    def _input_values(self) -> Tensor:
        if self.form == "sequence":
            return torch.randn(BATCH, 1, SOUND)
        mels, length = (self._size(self.config, name, default=0) for name in ("num_mel_bins", "max_length"))
        return torch.randn(BATCH, length, mels) if mels and length > 20 else torch.randn(BATCH, SOUND)

    def _input_features(self) -> Tensor:
        names = (
            "num_mel_bins",
            "input_feat_per_channel",
            "n_mels",
            "feature_projection_input_dim",
            "input_dim",
        )
        mels = self._size(self.audio, *names, "feature_size", default=80)
        positions = self._size(self.audio, "max_source_positions", default=0)
        if self.form == "long":
            return torch.randn(BATCH, mels, 2 * positions if positions else FRAMES)
        if self.form == "sequence":
            return torch.randn(BATCH, 1, FRAMES, mels)
        return torch.randn(BATCH, FRAMES, mels)

    # Numbers over time, and games.

    def _past_length(self) -> int:
        lags: Sequence[int] = getattr(self.config, "lags_sequence", None) or [0]
        return self._size(self.config, "context_length", default=32) + max(lags)

    def _past_values(self) -> Tensor:
        channels = self._size(self.config, "num_input_channels", default=0)
        one = hasattr(self.config, "lags_sequence") or not channels
        return torch.randn(BATCH, self._past_length(), *([] if one else [channels]))

    def _time_features(self) -> int:
        return int(getattr(self.config, "num_time_features", 0))

    def _future_values(self) -> Tensor | None:
        length = self._size(self.config, "prediction_length", default=8)
        return torch.randn(BATCH, length) if hasattr(self.config, "lags_sequence") else None

    def _future_time_features(self) -> Tensor:
        length = self._size(self.config, "prediction_length", default=8)
        return torch.randn(BATCH, length, self._time_features())

    # Labels.

    def _labels(self, made: Batch) -> Batch:
        names = self.parameters
        if {"start_positions", "end_positions"} <= names.keys():
            starts, ends = (torch.randint(first, first + 8, (BATCH,)) for first in (0, 8))
            return {"start_positions": starts, "end_positions": ends}
        if "return_loss" in names and "labels" not in names:
            return {"return_loss": True}
        if {"mask_labels", "class_labels"} <= names.keys():
            masks = [torch.randint(0, 2, (OBJECTS, *self._sides())).float() for _ in range(BATCH)]
            return {"mask_labels": masks, "class_labels": [torch.arange(OBJECTS) for _ in range(BATCH)]}
        found = (
            {"next_sentence_label": torch.randint(0, 2, (BATCH,))} if "next_sentence_label" in names else {}
        )
        label = self._label(made) if "labels" in names else None
        return found if label is None else {**found, "labels": label}

    def _label(self, made: Batch) -> Any:
        if self.name.endswith("TokenClassification"):
            return torch.randint(0, 2, made["input_ids"].shape)
        if "Classification" in self.name and "Frame" not in self.name:
            return torch.randint(0, 2, (BATCH,))
        if self.name.endswith("SemanticSegmentation"):
            return torch.randint(0, 2, (BATCH, *self._sides()))
        if self.name.endswith("Detection"):
            return [self._objects() for _ in range(BATCH)]
        if self.name.endswith("ForCTC"):
            return torch.randint(1, 20, (BATCH, 4))
        return self._words(made)

    def _objects(self) -> dict[str, Tensor]:
        return {"class_labels": torch.arange(OBJECTS), "boxes": torch.rand(OBJECTS, 4) * 0.4 + 0.2}

    def _words(self, made: Batch) -> Tensor | None:
        is_text = "input_ids" in self.parameters or "LM" in self.name or "Generation" in self.name
        if "decoder_input_ids" in self.parameters or (is_text and "input_ids" not in made):
            return self._ids(self._length() // 2)
        if not is_text:
            return None
        labels: Tensor = made["input_ids"].clone()
        mask = made.get("attention_mask")
        return labels if mask is None else labels.masked_fill(mask == 0, -100)


_SIMPLE: dict[str, Callable[[Batcher], Tensor | None]] = {
    "decoder_input_ids": lambda b: b._ids(b._length() // 2),
    "input_features_mask": lambda b: torch.ones(BATCH, FRAMES, dtype=torch.long),
    "inputs_embeds": lambda b: b._hidden(),
    "query_embeds": lambda b: b._hidden(16),
    "qformer_input_ids": lambda b: torch.randint(5, 100, (BATCH, 16)),
    "encoder_hidden_states": lambda b: torch.randn(
        BATCH, 16, b._size(b.config, "encoder_hidden_size", default=64)
    ),
    "visual_feats": lambda b: torch.randn(BATCH, 16, b._size(b.config, "visual_feat_dim", default=64)),
    "visual_pos": lambda b: torch.rand(BATCH, 16, 4),
    "grid_thw": lambda b: torch.tensor([GRID] * BATCH),
    "image_grid_thw": lambda b: torch.tensor([GRID] * BATCH),
    "image_grid_hw": lambda b: torch.tensor([GRID[1:]] * BATCH),
    "past_observed_mask": lambda b: (
        torch.ones(BATCH, b._past_length()) if hasattr(b.config, "lags_sequence") else None
    ),
    "past_time_features": lambda b: torch.randn(BATCH, b._past_length(), b._time_features()),
    "states": lambda b: torch.randn(BATCH, 20, b._size(b.config, "state_dim", default=17)),
    "actions": lambda b: torch.randn(BATCH, 20, b._size(b.config, "act_dim", default=4)),
    "returns_to_go": lambda b: torch.randn(BATCH, 20, 1),
    "rewards": lambda b: torch.randn(BATCH, 20, 1),
    "timesteps": lambda b: torch.arange(20).expand(BATCH, 20),
}
"""Arguments that take one line to make."""

_EXTRAS = {
    "pixel_values_videos", "input_features_mask", "past_observed_mask", "past_time_features", "future_values",
    "future_time_features", "states", "actions", "rewards", "returns_to_go", "timesteps", "qformer_input_ids",
    "visual_feats", "visual_pos", "encoder_hidden_states",
}  # fmt: skip
"""Optional arguments that are given unless the form is `plain`."""
