"""`Observer`: the interface by which the profiler sees what calls save and restore; eager only."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mesa_tune.engine.formula import Grads, Needs, Saved
from mesa_tune.engine.plan import CallPlan
from mesa_tune.engine.rematerialize import Recipe
from mesa_tune.engine.saved import SavedTensor
from mesa_tune.engine.storage import Packing
from mesa_tune.ops.maps import Deferred


class Replay:
    """One call's backward, which can run again with other versions of its saved tensors.

    `node` is the call's autograd node, `lossy` its lossy tensors as restored. `exact_inputs`: which of these
    are never packed. `present`: which inputs of the formula are tensors. `row`: number of elements that no
    group crosses (0: no limit). `axis`: the axis of a row's elements (0: rows are not left out).
    """

    def __init__(self, node: Any, plan: CallPlan, saved: Saved, grad: Tensor) -> None:
        self.layer, self.formula, self.needs = plan.layer, plan.formula, plan.needs
        self.exact_inputs, self.present = node.seen
        self.row, self.axis, self.node, self.grad = plan.spec.row, plan.spec.axis, node, grad
        self.saved = saved
        self.lossy = [tensor.whole() for tensor in saved.lossy]

    def run(self, lossy: Sequence[Tensor], needs: Needs) -> Grads:
        """Return the gradients that `needs` asks for, computed from `lossy` instead of the saved tensors."""
        tensors = [SavedTensor.of(tensor) for tensor in lossy]
        return self.formula.backward(self.saved._replace(needs=needs, lossy=tensors), self.grad)


class Observer:
    """Base class of objects that are shown what calls save and restore; each method does nothing here.

    `wants_tensors`: also compute tensors that a step would never compute as a whole, and show them.
    """

    wants_tensors = False

    def begin(self, layer: str | None, given: Any) -> None:
        """Note that a torch call begins; `layer` is None for a call that is not routed."""

    def end(self, layer: str | None, output: Any) -> None:
        """Note that this call has ended."""

    def asked(self, layer: str, tensors: Sequence[Tensor]) -> None:
        """Note that the plan of `layer` depends on whether one of `tensors` gets smaller."""

    def stored(
        self,
        layer: str,
        lossy: tuple[Tensor | Deferred, ...],
        how: tuple[Packing | Recipe, ...],
        parts: tuple[list[Tensor], ...],
        exact: list[Tensor],
        row: int,
        valued: bool = False,
    ) -> None:
        """Note that a call has stored `lossy` as `parts`, as `how` says, and `exact` as they are.

        `valued`: elements may be stored as fixed values, whether they are or not.
        """

    def saved(self, layer: str, tensor: Tensor) -> None:
        """Note that autograd itself saves `tensor` during a call of `layer`."""

    def backward(self, replay: Replay) -> None:
        """Note that a call's backward begins."""

    def unpacked(self, layer: str, tensor: Tensor) -> Tensor:
        """Return the tensor that a hook returns to autograd instead of `tensor`."""
        return tensor


class _Watch:
    """The observer, if there is one, and the number of our backwards that have begun.

    `returned`: called with the layer and the output of each routed call in eager code, to time it.
    """

    observer: Observer | None = None
    returned: Callable[[str, Any], object] | None = None
    backwards = 0


watch = _Watch()
