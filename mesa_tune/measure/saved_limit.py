"""`LimitMeter`: the saved bytes of every forward and backward in a body of code, beside a limit.

What is hard: the body is anybody's training code, plain or converted. Nothing says where its forward begins
and ends, or which tensors are its model and its batch. So a forward begins where a module is first called
with gradients enabled, and ends where autograd's engine first runs an operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from mesa_tune.conversion.layers import named_layers
from mesa_tune.errors import BudgetError
from mesa_tune.measure.memory.meter import Meter, storages
from mesa_tune.units import format_bytes, parse_bytes

_NAMED = 3
_OUTSIDE = "outside of modules"


class LimitMeter(Meter):
    """Meter of the bytes saved for each backward in its body; `most` is the largest number of them.

    Saved: born since the forward began and alive when its backward begins, except parameters, buffers and
    gradients. A batch that is made before the model is called is older. `limit`: an amount such as `6GB`, or
    bytes; raise BudgetError for others. `layers`: the bytes of `most` by the module that made them.
    """

    def __init__(self, limit: str | int) -> None:
        super().__init__()
        budget = parse_bytes(limit, "limit_saved")
        if budget.bytes is None:
            raise BudgetError(
                f"limit_saved {limit!r}: a share of what?\nwrite an amount, such as 6GB or 6GiB"
            )
        self.limit = budget.bytes
        self.backwards = 0
        self.most = 0
        self.layers: Counter[str] = Counter()
        self._makers: dict[int, str] = {}
        self._began = 0
        self._names: dict[nn.Module, str] = {}
        self._running: list[nn.Module] = []
        self._in_forward = self._in_backward = False
        self._hooks = ExitStack()

    def __enter__(self) -> LimitMeter:
        modules = nn.modules.module
        for handle in (
            modules.register_module_forward_pre_hook(self._enter_module),
            modules.register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_post_hook(lambda *_: self._begin_forward()),
        ):
            self._hooks.callback(handle.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._hooks.close()

    @property
    def over_limit(self) -> bool:
        """Whether a backward found more saved bytes than the limit."""
        return self.most > self.limit

    def explanation(self) -> str:
        """Return what was saved, by which layers, and the remedy."""
        largest = [f"{name}: {format_bytes(size)}" for name, size in self.layers.most_common(_NAMED)]
        most, limit = format_bytes(self.most), format_bytes(self.limit)
        return (
            f"{most} saved for backward, more than the limit of {limit}\n"
            f"most by {', '.join(largest)}\n"
            "`mesa-tune profile` tells what each layer saves; mt.convert(model, policy) saves less"
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not self._in_backward:
            self._measure()
        self._in_backward = in_backward
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _see_result(self, storage: UntypedStorage) -> None:
        before = self._count
        super()._see_result(storage)
        if self._count > before:
            self._makers[self._count] = self._layer()

    def _layer(self) -> str:
        if not self._running:
            return _OUTSIDE
        module = self._running[-1]
        return self._names.get(module) or type(module).__name__

    def _enter_module(self, module: nn.Module, _: object) -> None:
        if not self._running and torch._C._current_graph_task_id() == -1:
            if torch.is_grad_enabled() and not self._in_forward:
                self._begin_forward()
                self._in_forward = True
            self._names.update((part, name) for name, part in named_layers(module))
        self._running.append(module)

    def _leave_module(self, *_: object) -> None:
        self._running.pop()

    def _begin_forward(self) -> None:
        self._began = self.mark()

    def _measure(self) -> None:
        """Count what is alive where a backward begins."""
        self.backwards += 1
        parameters = [
            *leaves_of(torch._C._current_autograd_node()),
            *(tensor for module in self._names for tensor in module.parameters(recurse=False)),
        ]
        gradients = [tensor.grad for tensor in parameters if tensor.grad is not None]
        buffers = [tensor for module in self._names for tensor in module.buffers(recurse=False)]
        layers = self._layers_since(self._began, [*parameters, *gradients, *buffers])
        if layers.total() > self.most:
            self.most, self.layers = layers.total(), layers
        self._names, self._in_forward = {}, False

    def _layers_since(self, mark: int, without: list[Tensor]) -> Counter[str]:
        """Return what is alive and born after `mark`, except `without`: bytes by the layer that made them."""
        excluded = {storage._cdata for storage in storages(without)}
        layers: Counter[str] = Counter()
        for key, birth in self._births.items():
            if birth.number > mark and key not in excluded:
                layers[self._makers[birth.number]] += birth.bytes
        alive = {birth.number for birth in self._births.values()}
        self._makers = {number: name for number, name in self._makers.items() if number in alive}
        return layers


def leaves_of(node: Any) -> Iterator[Tensor]:
    """Yield the leaves whose gradients a backward that begins at `node` computes."""
    seen, waiting = {node}, [node]
    while waiting:
        found = waiting.pop()
        if (leaf := getattr(found, "variable", None)) is not None:
            yield leaf
        below = {edge for edge, _ in getattr(found, "next_functions", ())} - seen
        seen |= below
        waiting += below
