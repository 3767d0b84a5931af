"""Who watches calls (the profiler), and what it is shown; eager only."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from mesa_tune.engine.formula import Grads, Needs, Saved
from mesa_tune.engine.plan import CallPlan
from mesa_tune.engine.rematerialize import Recipe
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.engine.storage import Packing
from mesa_tune.ops.maps import Deferred


class Replay:
    """One call's backward, ready to be run again with its saved tensors stored in another way.

    `node` is the call's autograd node. By lossy tensor: `lossy` is what was restored, `exact_inputs` which of
    those are never packed. `present`: which inputs of the formula are tensors. `row`: after how many elements
    groups end (0: anywhere).
    """

    def __init__(self, node: Any, plan: CallPlan, saved: Saved, grad: Tensor) -> None:
        self.layer, self.formula, self.needs = plan.layer, plan.formula, plan.needs
        self.exact_inputs, self.present = node.seen
        self.row, self.node, self.grad = plan.spec.row, node, grad
        self.saved = saved
        self.lossy = [tensor.whole() for tensor in saved.lossy]

    def run(self, lossy: Sequence[Tensor], needs: Needs) -> Grads:
        """Return the gradients that `needs` asks for, from `lossy` in place of what was saved."""
        tensors = [SavedTensor.of(tensor) for tensor in lossy]
        return self.formula.backward(self.saved._replace(needs=needs, lossy=tensors), self.grad)


class Observer(Protocol):
    """Whoever wants to see what calls save and restore.

    `wants_tensors`: tensors that a step avoids to make are made for it.
    """

    @property
    def wants_tensors(self) -> bool: ...

    def begin(self, layer: str | None, given: Any) -> None:
        """A torch call begins; `layer` is None for a call that is not routed."""
        ...

    def end(self, layer: str | None, output: Any) -> None:
        """That call has ended."""
        ...

    def asked(self, layer: str, tensors: Sequence[Tensor | None]) -> None:
        """A call of `layer` goes by whether one of `tensors` is worth packing, or copying."""
        ...

    def stored(
        self,
        layer: str,
        lossy: tuple[Tensor | Deferred, ...],
        how: tuple[Packing | Recipe, ...],
        parts: tuple[list[Tensor], ...],
        exact: list[Tensor],
        row: int,
    ) -> None:
        """A call has stored `lossy` as `parts` (in the ways `how`, under a spec of this `row`), and `exact`
        as they are.
        """
        ...

    def saved(self, layer: str, tensor: Tensor) -> None:
        """Autograd itself saves `tensor` during a call of `layer`."""
        ...

    def backward(self, replay: Replay) -> None:
        """A call's backward begins."""
        ...

    def unpacked(self, layer: str, tensor: Tensor) -> Tensor:
        """A hook returns `tensor` to autograd; what is returned takes its position."""
        ...


class _Watch:
    """The observer, if there is one, and how many backwards of ours have begun."""

    observer: Observer | None = None
    backwards = 0


watch = _Watch()


def wants_tensors() -> bool:
    """Return whether an observer wants to see every tensor."""
    return watch.observer is not None and watch.observer.wants_tensors
