"""The one `autograd.Function` of ours: runs a formula, stores what it keeps, and decodes it in backward."""

from typing import Any, Protocol

import torch
from torch import Tensor

from mesa_tune.codecs import Spec
from mesa_tune.errors import RunError
from mesa_tune.functional.formula import Needs, Static
from mesa_tune.functional.keeping import Meta, keep, restore
from mesa_tune.functional.table import FORMULAS


class Observer(Protocol):
    """Whoever wants to see what is kept and restored (the profiler); eager only."""

    def kept(
        self, layer: str, name: str, lossy: tuple[Tensor, ...], metas: tuple[Meta, ...], exact: list[Tensor]
    ) -> None:
        """A call has stored `lossy` (described by `metas`) and `exact`."""
        ...

    def saved(self, layer: str, tensor: Tensor) -> None:
        """Autograd itself saves `tensor` during a call of `layer`."""
        ...

    def backward(self, replay: "Replay") -> None:
        """A call's backward begins."""
        ...


class Replay:
    """One call's backward, ready to be run again with its kept tensors stored in another way."""

    def __init__(
        self, ctx: Any, lossy: list[Tensor], exact: tuple[Tensor | None, ...], grads: tuple[Tensor, ...]
    ) -> None:
        self.layer, self.name, self.static, self.needs, self.spec, self.metas = ctx.call[:6]
        self.raw_flags: tuple[bool, ...] = ctx.call[6]
        self.node, self.lossy, self.exact, self.grads = ctx, lossy, exact, grads

    def run(self, lossy: list[Tensor], needs: Needs | None = None) -> tuple[Tensor | None, ...]:
        """The gradients of the call's tensor inputs, from `lossy` in place of what was kept."""
        formula = FORMULAS[self.name]
        return formula.backward(self.static, needs or self.needs, lossy, self.exact, *self.grads)


class _Watch:
    observer: Observer | None = None


watch = _Watch()


class Apply(torch.autograd.Function):
    """`apply(layer, name, static, needs, raw, spec, key, *tensors)`: see `Call.apply`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        layer: str,
        name: str,
        static: Static,
        needs: Needs,
        raw: Needs,
        spec: Spec,
        key: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        result = FORMULAS[name].forward(static, needs, *tensors)
        if result.in_place:
            ctx.mark_dirty(tensors[0])
        parts: list[Tensor] = []
        metas: list[Meta] = []
        flags: list[bool] = []
        for tensor in result.lossy:
            is_raw = any(flag and tensor is given for flag, given in zip(raw, tensors, strict=True))
            new, meta = keep(tensor, spec, key, is_raw)
            parts += new
            metas.append(meta)
            flags.append(is_raw)
        ctx.save_for_backward(*result.exact, *parts)
        ctx.call = (layer, name, static, needs, spec, tuple(metas), tuple(flags), len(result.exact))
        if watch.observer is not None:
            watch.observer.kept(
                layer, name, result.lossy, tuple(metas), [t for t in result.exact if t is not None]
            )
        return result.output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        layer, name, static, needs, spec, metas, _flags, exact_count = ctx.call
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RunError(
                f"backward with create_graph=True reached {layer!r}, which keeps a compressed copy.\n"
                "Second derivatives of compressed layers are not defined; give that layer `enable: False`, or mt.revert(model)."
            )
        saved = ctx.saved_tensors
        exact, parts = saved[:exact_count], list(saved[exact_count:])
        lossy = []
        for meta in metas:
            count = 2 if meta.coded else 1
            lossy.append(restore(parts[:count], meta, spec))
            del parts[:count]
        if watch.observer is not None:
            watch.observer.backward(Replay(ctx, lossy, exact, grads))
        return (None,) * 7 + FORMULAS[name].backward(static, needs, lossy, exact, *grads)
