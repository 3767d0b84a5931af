"""`QModule`: a model whose torch layers are converted to ActNN's.

What is hard: `state_dict` must have the plain model's keys, also where the `QModule` is inside another
module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mesa_tune.compat.actnn import layers
from mesa_tune.compat.actnn.scheme import QBNScheme, QScheme, link_batch_norms
from mesa_tune.compat.layers import change_class, name_layers, warn_unconverted

QUANTIZED: dict[type[nn.Module], type[layers._ActNNLayer]] = {
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
ALLOCATION_STEPS = 100
"""Steps between two allocations of bits to layers: ranges and gradients change slowly."""
_PREFIX = "model."


class QModule(nn.Module):
    """Convert `model`'s layers to ActNN's, in place, by the current configuration; weights and hooks stay.

    If the configuration is adaptive and `perlayer`, bits are allocated to layers again every
    `ALLOCATION_STEPS` training steps. `state_dict` has the plain model's keys, also inside other modules.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        QModule.convert_layers(model)
        self.steps = 0

    @staticmethod
    def convert_layers(module: nn.Module) -> None:
        """Convert torch's layers inside `module` to ActNN's; warn of those that save what PyTorch saves."""
        for child in list(module.modules())[1:]:
            if type(child) in QUANTIZED:
                change_class(child, QUANTIZED[type(child)]).start()
        name_layers(module)
        warn_unconverted(module, "ActNN has no layer for them")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._step()
        return self.model(*args, **kwargs)

    def _step(self) -> None:
        """Begin a training step: the first of `ALLOCATION_STEPS` observes, the second allocates bits."""
        schemes = [module.scheme for module in self.model.modules() if isinstance(module, layers._ActNNLayer)]
        weighted = link_batch_norms(schemes)
        position = self.steps % ALLOCATION_STEPS
        self.steps += 1
        for scheme in weighted:
            scheme.observing = position == 0
        if position == 1:
            QScheme.allocate_perlayer([scheme for scheme in weighted if scheme.config.perlayer])
            for norm in schemes:
                if isinstance(norm, QBNScheme) and norm.config.perlayer:
                    norm.copy_bits()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's `state_dict`, without a prefix for this wrapper."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a `state_dict` of this wrapper or of the plain model."""
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        # Inside another module, the outer load_state_dict passes keys without the name of our attribute.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}{_PREFIX}{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
