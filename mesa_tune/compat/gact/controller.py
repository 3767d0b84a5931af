"""GACT's controller: what autograd saves of a model and its loss, compressed from install to uninstall.

GACT's programs also write hooks of their own, `saved_tensors_hooks(pack, unpack)`, that call `quantize` and
`dequantize`. A hook sees a tensor, but not which function saves it, so it cannot know what rounding does to
the gradient. Therefore a forward of the model below such hooks is compressed as `install_hook` does it, and
the hooks themselves pass on what they get.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mesa_tune.codecs.mixed import allocate
from mesa_tune.compat.gact import conf
from mesa_tune.compat.gact.sensitivity import Estimate
from mesa_tune.conversion import convert, entering, revert
from mesa_tune.conversion.conversion import Conversion
from mesa_tune.conversion.layers import Catalog, named_layers
from mesa_tune.conversion.model import ConvertedForward, conversion_of
from mesa_tune.conversion.wrapping import Instead
from mesa_tune.engine.routing import inside_backward, state, top_hooks
from mesa_tune.formulas.table import own_route
from mesa_tune.notice import warn_once
from mesa_tune.policy import Policy
from mesa_tune.policy.rules import Rule
from mesa_tune.policy.settings import MIN_ELEMENTS
from mesa_tune.profiler.trace import observing
from mesa_tune.workload.preserve import preserved_random_states

MOST_BITS = 8


class Controller:
    """Compresses what `model` and the loss save for backward, from `install_hook()` to `uninstall_hook()`.

    Below saved-tensor hooks that call `quantize` and `dequantize` the model is compressed, too. What
    functions outside the model save stays as it is there.

    `iterate(get_grad)` belongs after every step. With `auto_prec` it measures how much each layer matters, at
    the first call and every `adapt_interval` ones, by one run of `get_grad` (a forward and a backward), and
    places `bit` bits per element on average. Layers go by name. `bits` has the bits of each layer adapted.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config = conf.config.copy()
        self.iter = 0
        self.bits: dict[str, int] = {}
        self._placed: tuple[Rule, ...] = ()
        self.policy = self._uniform()
        self._entered: ExitStack | None = None
        self._losses: Conversion | None = None
        self._hooks: list[Any] = []
        self._gate = _Gate(model, self) if self.compresses else None
        _controllers.add(self)
        for name in conf.unknown_changes(self.config):
            warn_once(f"mesa-tune: gact.config.{name} means nothing here.")
        if self.config.swap and self.config.compress_activation:
            warn_once(
                "mesa-tune: gact: packed tensors stay on the device: `swap` moves only what is not packed."
            )

    @property
    def compresses(self) -> bool:
        """Whether the level leaves anything to do."""
        return self.config.compress_activation or self.config.swap

    @property
    def is_applied(self) -> bool:
        """Whether the model is compressed now."""
        return self._entered is not None or (self._gate is not None and self._gate.is_open)

    def install_hook(self) -> None:
        """From now on the model and the loss save compressed copies. Installed twice is installed once."""
        if self.compresses and self._entered is None:
            self._close_gate()
            self._apply()

    def uninstall_hook(self) -> None:
        """The model and the loss save again what PyTorch saves."""
        if self._entered is not None:
            self._leave()
            revert(self.model)
        self._close_gate()

    def quantize(self, input: Tensor) -> Tensor:
        """For a pack hook: `input` without its history, in which the model's packed tensors are as they are.

        Called by somebody else's hooks, it makes the model's forwards below them compressed ones.
        """
        hook = top_hooks()
        if self._gate is not None and not state.frames:
            if hook is not None and hook not in self._hooks:
                self._hooks.append(hook)
            warn_once(
                "mesa-tune: gact: Controller.quantize leaves alone what functions outside the model save. "
                "Call install_hook() in place of hooks of your own to compress the loss, too; "
                "gact.ops.op_quantize packs a tensor."
            )
        return input.detach()

    def dequantize(self, input: Tensor) -> Tensor:
        """For an unpack hook: what `quantize` returned."""
        return input

    def leads_here(self, hook: Any) -> bool:
        """Whether the pack hook `hook` calls `quantize` of this controller, as far as can be seen."""
        if hook is None or self._entered is not None:
            return False
        if hook in self._hooks or getattr(hook, "__self__", None) is self:
            return True
        code = getattr(hook, "__code__", None)
        if code is None:
            return False
        named = [hook.__globals__.get(name) for name in code.co_names]
        closed = [cell.cell_contents for cell in hook.__closure__ or () if _is_filled(cell)]
        return any(value is self for value in named + closed)

    def iterate(self, get_grad: Callable[[], object] | None) -> None:
        """An iteration has ended; `get_grad()` runs a forward and a backward when they are needed.

        Gradients, buffers and random states are afterwards as before. Raises ValueError if they are needed
        and `get_grad` is None.
        """
        if not self.is_applied:
            return
        due = self.config.auto_prec and self.config.compress_activation
        if due and self.iter % self.config.adapt_interval == 0:
            if get_grad is None:
                raise ValueError(f"iteration {self.iter} adapts: give iterate() a function, not None")
            self.adapt(get_grad)
        elif self._entered is not None:
            self._leave()
            self._enter()
        self.iter += 1

    def adapt(self, get_grad: Callable[[], object]) -> None:
        """Measures, and places the bits anew."""
        if self._entered is not None:
            self._leave()
            self._enter()
        estimate = Estimate([parameter for parameter in self.model.parameters() if parameter.requires_grad])
        with _untouched(self.model), observing(estimate):
            get_grad()
        groups = [group for group in estimate.groups() if not self._drops(group.layers[0])]
        if not groups:
            raise ValueError(
                "get_grad() must run a forward and a backward of the model, but nothing was seen"
            )
        most = min(MOST_BITS, self.config.max_bit)
        errors, sizes = [group.error for group in groups], [group.size for group in groups]
        bits = allocate(errors, sizes, min(self.config.bit, most))
        pairs = list(zip(groups, bits, strict=True))
        self.bits = {layer: min(given, most) for group, given in pairs for layer in group.layers}
        self._placed = self._rules_of_bits()
        with self.lifted():
            pass

    def _drops(self, layer: str) -> bool:
        """Whether DropIT has `layer`: it has no bits to place."""
        conversion = conversion_of(self.model)
        spec = None if conversion is None else conversion.specs.get(layer)
        return spec is not None and spec.drop > 0

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """The model is not converted in the body; afterwards it is again, by what it is then."""
        installed, gate = self._entered is not None, self._gate
        hung, opened = gate is not None and gate.is_hung, gate is not None and gate.is_open
        if installed:
            self._leave()
            revert(self.model)
        self._close_gate()
        yield
        if installed:
            self._apply()
        elif gate is not None and hung:
            gate.hang()
            if opened:
                gate.open()

    def _close_gate(self) -> None:
        if self._gate is not None:
            self._gate.remove()

    def _rules_of_bits(self) -> tuple[Rule, ...]:
        conversions = (conversion_of(self.model), self._losses)
        tags = {name: tag for one in conversions if one for tag, _, name in one.catalog.known()}
        return tuple(
            Rule.of(tags[layer], None, [layer], {"level": 2**bits}) for layer, bits in self.bits.items()
        )

    def _uniform(self, more: tuple[Rule, ...] = ()) -> Policy:
        if not self.config.compress_activation:
            return Policy.uniform(store="offload")
        bits = min(self.config.bit, MOST_BITS)
        rules = Policy.uniform(2**bits, group_size=self.config.group_size).rules
        return Policy((*rules, *more, *_dropped(self.model)))

    def _apply(self) -> None:
        self.convert_model()
        self._enter()

    def convert_model(self) -> None:
        """The model saves by this controller's policy."""
        self.policy = self._uniform(self._placed)
        convert(self.model, self.policy, seed=torch.initial_seed() + self.iter)

    def _enter(self) -> None:
        """A step begins: the loss's calls are counted from 0 again."""
        if self._losses is None or self._losses.policy is not self.policy:
            self._losses = Conversion(self.policy, Catalog.empty(), torch.initial_seed(), MIN_ELEMENTS)
        self._entered = ExitStack()
        self._entered.enter_context(entering.entered(self._losses, "loss"))

    def _leave(self) -> None:
        if self._entered is not None:
            self._entered.close()
            self._entered = None


class _Gate(Instead):
    """The forward of a controller's model: converts the model where hooks around it lead to the controller.

    A copy of the model is no longer the controller's.
    """

    def __init__(self, model: nn.Module, controller: Controller) -> None:
        self.module = model
        self.controller: weakref.ref[Controller] | None = weakref.ref(controller)
        self.converted: ConvertedForward | None = None
        self.hang()

    @property
    def is_open(self) -> bool:
        """Whether the model is converted."""
        return self.converted is not None

    @property
    def is_hung(self) -> bool:
        """Whether it is the forward of the model."""
        return self.module.__dict__.get("forward") is self

    def open(self) -> None:
        """Converts the model. Its own forward stays this one, and calls the converted one."""
        controller = None if self.controller is None else self.controller()
        assert controller is not None
        controller.convert_model()
        wrapped = self.module.__dict__["forward"]
        assert isinstance(wrapped, ConvertedForward)
        wrapped.before = self.before
        self.converted = wrapped
        self.module.__dict__["forward"] = self

    def close(self) -> None:
        """Reverts the model."""
        if self.converted is not None:
            self.converted = None
            revert(self.module)

    def remove(self) -> None:
        """Reverts the model, and leaves it."""
        self.close()
        if self.is_hung:
            self.take_down()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not (state.frames or inside_backward()):
            self._turn()
        if self.converted is not None:
            return self.converted(*args, **kwargs)
        return self.plain(*args, **kwargs)

    def _turn(self) -> None:
        controller = None if self.controller is None else self.controller()
        wanted = controller is not None and controller.leads_here(top_hooks())
        if wanted and self.converted is None:
            self.open()
        elif not wanted and self.controller is not None:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "controller": None}


_controllers: weakref.WeakSet[Controller] = weakref.WeakSet()


@contextmanager
def controllers_lifted(model: nn.Module) -> Iterator[None]:
    """No module of `model` is converted by a controller in the body; afterwards they are again."""
    modules = set(model.modules())
    with ExitStack() as stack:
        for controller in list(_controllers):
            if not modules.isdisjoint(controller.model.modules()):
                stack.enter_context(controller.lifted())
        yield


def _is_filled(cell: Any) -> bool:
    """Whether a variable of a closure has a value already."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Gradients, buffers, modes and random states of `model` are afterwards as before."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with preserved_random_states():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, copy in buffers:
                buffer.copy_(copy)
        for module, mode in modes:
            module.training = mode


def _dropped(model: nn.Module) -> Iterator[Rule]:
    """Rules for the modules that DropIT has taken: they drop as before, their survivors exact."""
    for name, module in named_layers(model):
        dropiter: Any = module.__dict__.get("dropiter")
        if dropiter is None:
            continue
        if dropiter.strategy == "vrandom":
            warn_once(f"mesa-tune: {name!r} drops by magnitude under GACT: no policy can say vrandom.")
        route = own_route(module)
        names = [name] if route is not None else [f"{name}.*"]
        keys = {"drop": dropiter.gamma, "store": "exact"}
        yield Rule.of("fc" if route is None else route.tag, None, names, keys)
