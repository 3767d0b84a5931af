"""Mesa's layers: torch's, with Mesa's attributes and Mesa's three entries in `state_dict`."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.codecs import Memory, Spec
from mesa_tune.compat.layers import Keeping
from mesa_tune.compat.mesa.parameters import binds, read
from mesa_tune.engine.function import Memories
from mesa_tune.formulas.matmul import MatMul as TorchMatMul
from mesa_tune.notice import warn_once
from mesa_tune.policy.settings import KEYS, LayerSettings


class Quantizer(nn.Module):
    """How one tensor is stored: Mesa's attributes `enable level ema_decay quant_groups` and running ranges.

    `clip_val` (extent of each group's range) and `shift` (its lower end), float32 of shape (quant_groups,),
    and `iteration`, float32 of shape (1,), are buffers under Mesa's names, so checkpoints pass both ways.
    Further keys of `LayerSettings` (`group_size drop …`) are attributes too, which policies of ours set.
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
        """Sets every attribute to Mesa's default."""
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
        """From now on so many groups, whose ranges are not known yet."""
        self.quant_groups = quant_groups
        device = self.iteration.device
        self.register_buffer("clip_val", torch.ones(quant_groups, device=device))
        self.register_buffer("shift", torch.zeros(quant_groups, device=device))
        self.iteration.zero_()

    def settings_now(self) -> LayerSettings:
        """The attributes as settings of ours."""
        values: dict[str, Any] = {key: getattr(self, key) for key in KEYS}
        values["quant_groups"] = None if self.group_size else self.quant_groups
        return LayerSettings(**values)

    def memory(self) -> Memory:
        """The running ranges, which a codec changes in place."""
        return {"clip_val": self.clip_val, "shift": self.shift, "iteration": self.iteration}

    def update_quantization_parameter(self, **parameters: Any) -> None:
        """Sets attributes as a rule of a policy says: `by_index` and `by_tag` decide whether, `index` is set.

        Values may be text. Raises PolicyError for a key or a value that a policy cannot have.
        """
        index = parameters.pop("index", self.index)
        self.index = index.get(self.tag, self.index) if isinstance(index, dict) else index
        if "by_index" not in parameters or not binds(parameters, self.tag, self.index):
            return
        for key, value in read(parameters).items():
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


class _Layer(Keeping, Quantizer):
    """Takes `quant_groups` beside the twin's arguments. `mesa=True` is Mesa's word for enabled.

    `instead`: how an enabled layer stores what it keeps in place of its attributes (DropIT beside Mesa).
    """

    instead: Spec | None = None

    def __init__(
        self,
        *given: Any,
        mesa: bool = False,
        args: Any = None,
        logger: Any = None,
        quant_groups: int | tuple[int, ...] = 1,
        **named: Any,
    ) -> None:
        super().__init__(*given, **named)
        for name, value in (("args", args), ("logger", logger)):
            if value is not None:
                warn_once(f"mesa-tune: ms.{type(self).__name__}: {name!r} means nothing here.")
        self.start(quant_groups, mesa)

    def is_compressing(self) -> bool:
        return self.training and self.enable

    def kept_by(self) -> LayerSettings | Spec:
        return self.instead or self.settings_now()

    def memories(self, *args: Any, **kwargs: Any) -> Memories:
        return {0: self.memory()}

    def extra_repr(self) -> str:
        """The twin's description, and Mesa's attributes."""
        shown = [f"index={self.index}", f"tag={self.tag}"]
        shown += [self.settings_now().label] if self.enable else []
        return ", ".join(part for part in (super().extra_repr(), *shown) if part)


class Linear(_Layer, nn.Linear):
    """`nn.Linear`; keeps the input."""

    tag = "fc"


class Conv2d(_Layer, nn.Conv2d):
    """`nn.Conv2d`, every `padding_mode` included; keeps the input."""

    tag = "conv"


class BatchNorm2d(_Layer, nn.BatchNorm2d):
    """`nn.BatchNorm2d`; keeps the normalized input."""

    tag = "bn"


class LayerNorm(_Layer, nn.LayerNorm):
    """`nn.LayerNorm`; keeps the normalized input."""

    tag = "layernorm"


class GELU(_Layer, nn.GELU):
    """`nn.GELU`; keeps its derivative."""

    tag = "gelu"


class ReLU(_Layer, nn.ReLU):
    """`nn.ReLU`; keeps one exact bit an element at any level."""

    tag = "relu"


class Softmax(_Layer, nn.Softmax):
    """`nn.Softmax`; keeps the output."""

    tag = "softmax"


class _Operand(Quantizer):
    def __init__(self, tag: str, quant_groups: int, enable: bool) -> None:
        super().__init__()
        self.tag = tag
        self.start(quant_groups, enable)


class MatMul(Keeping, TorchMatMul):
    """`MatMul(quant_groups=3)(q, k)` is `q @ k`; keeps both operands, `quant1` and `quant2` saying how."""

    tag = "matmul"

    def __init__(
        self, mesa: bool = False, args: Any = None, logger: Any = None, quant_groups: int = 1
    ) -> None:
        super().__init__()
        self.quant1 = _Operand("matmul-1", quant_groups, mesa)
        self.quant2 = _Operand("matmul-2", quant_groups, mesa)

    def update_quantization_parameter(self, **parameters: Any) -> None:
        """As `Quantizer`'s, for both operands."""
        self.quant1.update_quantization_parameter(**parameters)
        self.quant2.update_quantization_parameter(**parameters)

    @property
    def operands(self) -> tuple[_Operand, _Operand]:
        """`quant1` and `quant2`."""
        return self.quant1, self.quant2

    def is_compressing(self) -> bool:
        return self.training and self.quant1.enable and self.quant2.enable

    def kept_by(self) -> LayerSettings:
        first, second = (operand.settings_now() for operand in self.operands)
        if first != second:
            raise ValueError(
                "ms.MatMul stores both operands alike, "
                f"but got (quant1: {first.label}, quant2: {second.label})"
            )
        return first

    def memories(self, input: Tensor, other: Tensor) -> Memories:
        # An operand is kept where its partner wants a gradient.
        kept = [self.quant1] if other.requires_grad else []
        kept += [self.quant2] if input.requires_grad else []
        return {place: operand.memory() for place, operand in enumerate(kept)}

    def __getattr__(self, name: str) -> Any:
        # Mesa's attributes of a layer; both operands have the same.
        if name in _SHARED:
            return getattr(self.quant1, name)
        return super().__getattr__(name)


_SHARED = ("index", "enable", "level", "ema_decay", "quant_groups")
