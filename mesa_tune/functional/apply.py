"""The one `autograd.Function` of ours: runs a formula, stores what it keeps, and decodes it in backward."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mesa_tune.codecs import Memory, Spec
from mesa_tune.errors import RunError
from mesa_tune.functional.formula import Needs, Static
from mesa_tune.functional.keeping import Meta, keep, restore
from mesa_tune.functional.table import FORMULAS

Memories = dict[int, Memory]
"""What codecs remember of one layer, by the place of the kept tensor in `Result.lossy`."""


class Observer(Protocol):
    """Whoever wants to see what is kept and restored (the profiler); eager only."""

    def begin(self, layer: str | None, given: Any) -> None:
        """A torch call begins; `layer` is None for a call that is not routed."""
        ...

    def end(self, layer: str | None, output: Any) -> None:
        """That call has ended."""
        ...

    def kept(
        self,
        layer: str,
        lossy: tuple[Tensor, ...],
        metas: tuple[Meta, ...],
        parts: tuple[list[Tensor], ...],
        exact: list[Tensor],
    ) -> None:
        """A call has stored `lossy` as `parts` (described by `metas`), and `exact` as it is."""
        ...

    def saved(self, layer: str, tensor: Tensor) -> None:
        """Autograd itself saves `tensor` during a call of `layer`."""
        ...

    def backward(self, replay: "Replay") -> None:
        """A call's backward begins."""
        ...

    def unpacked(self, layer: str, tensor: Tensor) -> Tensor:
        """A hook gives `tensor` back to autograd; what is returned takes its place."""
        ...


class Replay:
    """One call's backward, ready to be run again with its kept tensors stored in another way.

    `node` is the call's autograd node, `lossy` what was kept of it as restored, `raw` which of those are
    never
    encoded, `present` which inputs of the formula are tensors.
    """

    def __init__(
        self, node: Any, call: "_CallInfo", lossy: list[Tensor], exact: Any, grads: tuple[Tensor, ...]
    ) -> None:
        self.layer, self.name, self.static, self.needs = call.layer, call.name, call.static, call.needs
        self.raw, self.present = call.raw, call.present
        self.node, self.lossy, self.exact, self.grads = node, lossy, exact, grads

    def run(self, lossy: list[Tensor], needs: Needs) -> tuple[Tensor | None, ...]:
        """The gradients that `needs` asks for, from `lossy` in place of what was kept."""
        return FORMULAS[self.name].backward(self.static, needs, lossy, self.exact, *self.grads)


class _CallInfo(NamedTuple):
    layer: str
    name: str
    static: Static
    needs: Needs
    present: Needs
    spec: Spec
    metas: tuple[Meta, ...]
    raw: Needs
    exact_count: int


class _Watch:
    observer: Observer | None = None
    backwards = 0


watch = _Watch()


def _same(tensor: Tensor, given: Tensor | None) -> bool:
    """Whether `tensor` is `given` or, as far as that can be asked, a view of it."""
    if tensor is given or given is None or torch.compiler.is_compiling():
        return tensor is given
    strided = tensor.layout is given.layout is torch.strided
    return strided and tensor.untyped_storage()._cdata == given.untyped_storage()._cdata


class Apply(torch.autograd.Function):
    """`apply(layer, name, static, needs, raw, spec, key, memory, *tensors)`: see `Call.apply`."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: str,
        name: str,
        static: Static,
        needs: Needs,
        raw: Needs,
        spec: Spec,
        key: Tensor,
        memory: Memories | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        result = FORMULAS[name].forward(static, needs, *tensors)
        if result.in_place:
            ctx.mark_dirty(tensors[0])
        parts: list[list[Tensor]] = []
        metas: list[Meta] = []
        never: list[bool] = []
        for place, tensor in enumerate(result.lossy):
            never.append(any(flag and _same(tensor, given) for flag, given in zip(raw, tensors, strict=True)))
            stored, meta = keep(
                tensor, spec, key, never[-1], layer, None if memory is None else memory.setdefault(place, {})
            )
            parts.append(stored)
            metas.append(meta)
        ctx.save_for_backward(*result.exact, *(part for stored in parts for part in stored))
        present = tuple(given is not None for given in tensors)
        ctx.call = _CallInfo(
            layer, name, static, needs, present, spec, tuple(metas), tuple(never), len(result.exact)
        )
        if watch.observer is not None:
            exact = [tensor for tensor in result.exact if tensor is not None]
            watch.observer.kept(layer, result.lossy, tuple(metas), tuple(parts), exact)
        return result.output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: _CallInfo = ctx.call
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RunError(
                f"backward with create_graph=True reached {call.layer!r}, which keeps a compressed copy.\n"
                "Second derivatives of compressed layers are not defined; "
                "give that layer `enable: False`, or mt.revert(model)."
            )
        if not torch.compiler.is_compiling():
            watch.backwards += 1
        saved = ctx.saved_tensors
        exact, parts = saved[: call.exact_count], list(saved[call.exact_count :])
        lossy = []
        for meta in call.metas:
            lossy.append(restore(parts[: meta.parts], meta, call.spec))
            del parts[: meta.parts]
        if watch.observer is not None:
            watch.observer.backward(Replay(ctx, call, lossy, exact, grads))
        return (None,) * 8 + FORMULAS[call.name].backward(call.static, call.needs, lossy, exact, *grads)
