"""Mesa's layers: torch's layers with Mesa's attributes and Mesa's three entries in `state_dict`.

What is hard: checkpoints must load in both directions, so running ranges are buffers with Mesa's names and
shapes, although they are ours to update.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.codecs import Memory, Spec
from mesa_tune.compat.layers import CompatLayer
from mesa_tune.compat.mesa.parameters import matches, parse_settings
from mesa_tune.engine.function import Memories
from mesa_tune.formulas.matmul import MatMul as TorchMatMul
from mesa_tune.notice import warn_once
from mesa_tune.policy.settings import KEYS, LayerSettings


class Quantizer(nn.Module):
    """How one tensor is stored: Mesa's attributes `enable level ema_decay quant_groups`, and running ranges.

    The running ranges are buffers with Mesa's names, so checkpoints load in both directions: `clip_val`
    (width of each group's range) and `shift` (its lower end), float32 of shape (quant_groups,), and
    `iteration`, float32 of shape (1,). The other keys of `LayerSettings` (`group_size drop …`) are
    attributes, too; mesa-tune's own policies set them.
    """

    tag = "fm"
    enable: bool
    level: int
    ema_decay: float
    group_size: int | None
    clip_val: Tensor
    shift: Tensor
    iteration: Tensor

    def start(self, quant_groups: int | tuple[int, ...], enable: bool = False) -> None:
        """Set every attribute to Mesa's default."""
        for field in fields(LayerSettings):
            setattr(self, field.name, field.default)
        self.index = -1
        self.enable = enable
        self.ema_decay = 0.9
        self.group_size = None
        self.verbose: Any = print
        self.register_buffer("iteration", torch.zeros(1))
        self.regroup(quant_groups[0] if isinstance(quant_groups, tuple) else quant_groups)

    def regroup(self, quant_groups: int) -> None:
        """Set the number of groups, and reset their running ranges."""
        self.quant_groups = quant_groups
        device = self.iteration.device
        self.register_buffer("clip_val", torch.ones(quant_groups, device=device))
        self.register_buffer("shift", torch.zeros(quant_groups, device=device))
        self.iteration.zero_()

    def layer_settings(self) -> LayerSettings:
        """Return the attributes as `LayerSettings`."""
        values: dict[str, Any] = {key: getattr(self, key) for key in KEYS}
        values["quant_groups"] = None if self.group_size else self.quant_groups
        return LayerSettings(**values)

    def memory(self) -> Memory:
        """Return the running ranges, which the codec updates in place."""
        return {"clip_val": self.clip_val, "shift": self.shift, "iteration": self.iteration}

    def update_quantization_parameter(self, **parameters: Any) -> None:
        """Set attributes by a policy rule, if its `by_index` and `by_tag` match; always set `index`.

        Values may be text.

        Raises:
            PolicyError: a key or a value that no policy can have.
        """
        index = parameters.pop("index", self.index)
        self.index = index.get(self.tag, self.index) if isinstance(index, dict) else index
        if "by_index" not in parameters or not matches(parameters, self.tag, self.index):
            return
        for key, value in parse_settings(parameters).items():
            self._set(key, value)
            self.verbose(f"update {self.tag}_{key} to {value} for index {self.index}")

    def _set(self, key: str, value: Any) -> None:
        if key == "quant_groups":
            self.group_size = None
            if value != self.quant_groups:
                self.regroup(value)
        elif isinstance(getattr(self, key), Tensor):
            getattr(self, key).fill_(value)
        else:
            setattr(self, key, value)


class _MesaLayer(CompatLayer, Quantizer):
    """Mixin before a torch layer: adds the argument `quant_groups`. `mesa=True` is Mesa's word for enabled.

    `dropit_spec`: set by `to_dropit`; an enabled layer then stores by it instead of by its attributes.
    """

    dropit_spec: Spec | None = None

    def __init__(
        self,
        *layer_args: Any,
        mesa: bool = False,
        args: Any = None,
        logger: Any = None,
        quant_groups: int | tuple[int, ...] = 1,
        **layer_kwargs: Any,
    ) -> None:
        super().__init__(*layer_args, **layer_kwargs)
        for name, value in (("args", args), ("logger", logger)):
            if value is not None:
                warn_once(f"mesa-tune: ms.{type(self).__name__}: {name!r} means nothing here.")
        self.start(quant_groups, mesa)

    def is_compressing(self) -> bool:
        return self.training and self.enable

    def storage_settings(self) -> LayerSettings | Spec:
        return self.dropit_spec or self.layer_settings()

    def memories(self, *args: Any, **kwargs: Any) -> Memories:
        return {0: self.memory()}

    def extra_repr(self) -> str:
        """Return torch's description with Mesa's attributes."""
        shown = [f"index={self.index}", f"tag={self.tag}"]
        shown += [self.layer_settings().label] if self.enable else []
        return ", ".join(part for part in (super().extra_repr(), *shown) if part)


class Linear(_MesaLayer, nn.Linear):
    """`nn.Linear`; saves the input."""

    tag = "fc"


class Conv2d(_MesaLayer, nn.Conv2d):
    """`nn.Conv2d`, every `padding_mode` included; saves the input."""

    tag = "conv"


class BatchNorm2d(_MesaLayer, nn.BatchNorm2d):
    """`nn.BatchNorm2d`; saves the normalized input."""

    tag = "bn"


class LayerNorm(_MesaLayer, nn.LayerNorm):
    """`nn.LayerNorm`; saves the normalized input."""

    tag = "layernorm"


class GELU(_MesaLayer, nn.GELU):
    """`nn.GELU`; saves its derivative."""

    tag = "gelu"


class ReLU(_MesaLayer, nn.ReLU):
    """`nn.ReLU`; saves 1 exact bit per element at any level."""

    tag = "relu"


class Softmax(_MesaLayer, nn.Softmax):
    """`nn.Softmax`; saves the output."""

    tag = "softmax"


class _Operand(Quantizer):
    def __init__(self, tag: str, quant_groups: int, enable: bool) -> None:
        super().__init__()
        self.tag = tag
        self.start(quant_groups, enable)


class MatMul(CompatLayer, TorchMatMul):
    """`MatMul(quant_groups=3)(q, k)` is `q @ k`; saves both operands, as `quant1` and `quant2` say."""

    tag = "matmul"

    def __init__(
        self, mesa: bool = False, args: Any = None, logger: Any = None, quant_groups: int = 1
    ) -> None:
        super().__init__()
        self.quant1 = _Operand("matmul-1", quant_groups, mesa)
        self.quant2 = _Operand("matmul-2", quant_groups, mesa)

    def update_quantization_parameter(self, **parameters: Any) -> None:
        """Call `Quantizer.update_quantization_parameter` for both operands."""
        self.quant1.update_quantization_parameter(**parameters)
        self.quant2.update_quantization_parameter(**parameters)

    @property
    def operands(self) -> tuple[_Operand, _Operand]:
        """`quant1` and `quant2`."""
        return self.quant1, self.quant2

    def is_compressing(self) -> bool:
        return self.training and self.quant1.enable and self.quant2.enable

    def storage_settings(self) -> LayerSettings:
        first, second = (operand.layer_settings() for operand in self.operands)
        if first != second:
            raise ValueError(
                "ms.MatMul stores both operands alike, "
                f"but got (quant1: {first.label}, quant2: {second.label})"
            )
        return first

    def memories(self, input: Tensor, other: Tensor) -> Memories:
        # The gradient of one operand needs the other, so each is saved only if the other requires a gradient.
        saved = [self.quant1] if other.requires_grad else []
        saved += [self.quant2] if input.requires_grad else []
        return {position: operand.memory() for position, operand in enumerate(saved)}

    def __getattr__(self, name: str) -> Any:
        # Mesa's attributes of a layer; both operands have the same values.
        if name in _LAYER_ATTRIBUTES:
            return getattr(self.quant1, name)
        return super().__getattr__(name)


_LAYER_ATTRIBUTES = ("index", "enable", "level", "ema_decay", "quant_groups")
