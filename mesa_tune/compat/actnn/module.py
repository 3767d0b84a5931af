"""`QModule`: a model whose torch layers have become ActNN's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mesa_tune.compat.actnn import layers
from mesa_tune.compat.actnn.scheme import QBNScheme, QScheme, relate
from mesa_tune.compat.layers import become, keepers_of_torch, name_layers, warn_left_alone

TWINS: dict[type[nn.Module], type[layers._Layer]] = {
    nn.Conv1d: layers.QConv1d,
    nn.Conv2d: layers.QConv2d,
    nn.Conv3d: layers.QConv3d,
    nn.ConvTranspose1d: layers.QConvTranspose1d,
    nn.ConvTranspose2d: layers.QConvTranspose2d,
    nn.ConvTranspose3d: layers.QConvTranspose3d,
    nn.BatchNorm1d: layers.QBatchNorm1d,
    nn.BatchNorm2d: layers.QBatchNorm2d,
    nn.BatchNorm3d: layers.QBatchNorm3d,
    nn.SyncBatchNorm: layers.QSyncBatchNorm,
    nn.Linear: layers.QLinear,
    nn.ReLU: layers.QReLU,
    nn.Dropout: layers.QDropout,
    nn.MaxPool2d: layers.QMaxPool2d,
    nn.AvgPool2d: layers.QAvgPool2d,
}
EVERY = 100
"""Steps between two allocations of bits to layers; ranges and gradients drift slowly."""
_PREFIX = "model."


class QModule(nn.Module):
    """`model`, in place with ActNN's layers, by the configuration of this moment; weights and hooks stay.

    Every `EVERY` training steps bits are allotted to layers anew where the configuration is adaptive and
    `perlayer`. `state_dict` has the model's own keys, alone and inside other modules.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        QModule.convert_layers(model)
        self.steps = 0

    @staticmethod
    def convert_layers(module: nn.Module) -> None:
        """torch's layers below `module` become ActNN's; a warning names those that keep what torch keeps."""
        for child in list(module.modules())[1:]:
            if type(child) in TWINS:
                become(child, TWINS[type(child)]).start()
        name_layers(module)
        warn_left_alone(module, keepers_of_torch(module), "ActNN has no layer for them")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._step()
        return self.model(*args, **kwargs)

    def _step(self) -> None:
        """A training step begins: layers watch in the first of every `EVERY`; bits follow in the second."""
        found = [module.scheme for module in self.model.modules() if isinstance(module, layers._Layer)]
        weighted = relate(found)
        place = self.steps % EVERY
        self.steps += 1
        for scheme in weighted:
            scheme.watching = place == 0
        if place == 1:
            QScheme.allocate_perlayer([scheme for scheme in weighted if scheme.config.perlayer])
            for norm in found:
                if isinstance(norm, QBNScheme) and norm.config.perlayer:
                    norm.follow()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, without a prefix of its own."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads what `state_dict` gave, or what the plain model's gave."""
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        # Inside another module loading asks for keys as they are nested.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}{_PREFIX}{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
