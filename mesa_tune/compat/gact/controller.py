"""GACT's controller: compresses what a model and its loss save, from `install_hook` to `uninstall_hook`.

What is hard: GACT's programs also enter hooks of their own, `saved_tensors_hooks(pack, unpack)`, which call
`quantize` and `dequantize`. A hook sees a tensor, but not which function saves it, so it cannot tell what
rounding does to the gradient. Therefore a forward of the model inside such hooks is compressed as after
`install_hook`, and the hooks themselves return their tensors unchanged.
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
from mesa_tune.conversion.wrapping import ReplacementForward
from mesa_tune.engine.routing import inside_backward, state, top_hooks
from mesa_tune.formulas.table import own_route
from mesa_tune.measure.memory.trace import observing
from mesa_tune.notice import warn_once
from mesa_tune.policy import Policy
from mesa_tune.policy.rules import Rule
from mesa_tune.policy.settings import MIN_ELEMENTS
from mesa_tune.workload.preserve import preserved_random_states

MAX_BITS = 8


class Controller:
    """Compresses what `model` and the loss save for backward, from `install_hook()` to `uninstall_hook()`.

    Inside saved-tensor hooks that call `quantize` and `dequantize` the model is compressed, too; what
    functions outside the model save there stays exact.

    Call `iterate(get_grad)` after every step. With `auto_prec`, the first call and then every
    `adapt_interval`-th call measures the sensitivity of each layer in one run of `get_grad` (a forward and a
    backward), and allocates `bit` bits per element on average. `bits`: the bits of each adapted layer, by
    name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config = conf.config.copy()
        self.iter = 0
        self.bits: dict[str, int] = {}
        self._adapted: tuple[Rule, ...] = ()
        self.policy = self._make_policy()
        self._entered: ExitStack | None = None
        self._losses: Conversion | None = None
        self._hooks: list[Any] = []
        self._forward = _ControllerForward(model, self) if self.compresses else None
        _controllers.add(self)
        for name in conf.changes_without_effect(self.config):
            warn_once(f"mesa-tune: gact.config.{name} means nothing here.")
        if self.config.swap and self.config.compress_activation:
            warn_once(
                "mesa-tune: gact: packed tensors stay on the device: `swap` moves only what is not packed."
            )

    @property
    def compresses(self) -> bool:
        """Whether the level compresses or offloads anything."""
        return self.config.compress_activation or self.config.swap

    @property
    def is_applied(self) -> bool:
        """Whether the model is compressed now."""
        return self._entered is not None or (self._forward is not None and self._forward.is_converted)

    def install_hook(self) -> None:
        """Compress what the model and the loss save from now on. A second call does nothing."""
        if self.compresses and self._entered is None:
            self._remove_forward()
            self._apply()

    def uninstall_hook(self) -> None:
        """Let the model and the loss save what PyTorch saves."""
        if self._entered is not None:
            self._leave()
            revert(self.model)
        self._remove_forward()

    def quantize(self, input: Tensor) -> Tensor:
        """For a pack hook: return `input`, detached.

        A call from a program's own hook tells the controller to compress the model's forwards inside that
        hook.
        """
        hook = top_hooks()
        if self._forward is not None and not state.frames:
            if hook is not None and hook not in self._hooks:
                self._hooks.append(hook)
            warn_once(
                "mesa-tune: gact: Controller.quantize leaves unchanged what functions outside the model "
                "save. Call install_hook() instead of hooks of your own to compress the loss, too; "
                "gact.ops.op_quantize packs a tensor."
            )
        return input.detach()

    def dequantize(self, input: Tensor) -> Tensor:
        """For an unpack hook: return what `quantize` returned."""
        return input

    def is_called_by(self, hook: Any) -> bool:
        """Return whether the pack hook `hook` refers to this controller, or has called its `quantize`."""
        if hook is None or self._entered is not None:
            return False
        if hook in self._hooks or getattr(hook, "__self__", None) is self:
            return True
        code = getattr(hook, "__code__", None)
        if code is None:
            return False
        from_globals = [hook.__globals__.get(name) for name in code.co_names]
        from_closure = [cell.cell_contents for cell in hook.__closure__ or () if _is_filled(cell)]
        return any(value is self for value in from_globals + from_closure)

    def iterate(self, get_grad: Callable[[], object] | None) -> None:
        """End an iteration, and adapt if it is time: `get_grad()` then runs a forward and a backward.

        Gradients, buffers and random states stay as they are.

        Raises:
            ValueError: `get_grad` is None in an iteration that adapts.
        """
        if not self.is_applied:
            return
        due = self.config.auto_prec and self.config.compress_activation
        if due and self.iter % self.config.adapt_interval == 0:
            if get_grad is None:
                raise ValueError(f"iteration {self.iter} adapts: pass iterate() a function, not None")
            self.adapt(get_grad)
        elif self._entered is not None:
            self._leave()
            self._enter()
        self.iter += 1

    def adapt(self, get_grad: Callable[[], object]) -> None:
        """Measure the sensitivity of the layers, and allocate their bits again."""
        if self._entered is not None:
            self._leave()
            self._enter()
        estimate = Estimate([parameter for parameter in self.model.parameters() if parameter.requires_grad])
        with _state_preserved(self.model), observing(estimate):
            get_grad()
        groups = [group for group in estimate.groups() if not self._drops(group.layers[0])]
        if not groups:
            raise ValueError(
                "get_grad() must run a forward and a backward of the model, but nothing was seen"
            )
        limit = min(MAX_BITS, self.config.max_bit)
        errors, sizes = [group.error for group in groups], [group.size for group in groups]
        allocated = zip(groups, allocate(errors, sizes, min(self.config.bit, limit)), strict=True)
        self.bits = {layer: min(bits, limit) for group, bits in allocated for layer in group.layers}
        self._adapted = self._rules_of_bits()
        with self.suspended():  # converts again, by the new rules
            pass

    def _drops(self, layer: str) -> bool:
        """Return whether DropIT compresses `layer`, which then has no bits to allocate."""
        conversion = conversion_of(self.model)
        spec = None if conversion is None else conversion.specs.get(layer)
        return spec is not None and spec.drop > 0

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Revert the model at entry; convert it again at exit, with the layers and bits that it then has."""
        installed, forward = self._entered is not None, self._forward
        was_installed = forward is not None and forward.is_installed
        was_converted = forward is not None and forward.is_converted
        if installed:
            self._leave()
            revert(self.model)
        self._remove_forward()
        yield
        if installed:
            self._apply()
        elif forward is not None and was_installed:
            forward.install()
            if was_converted:
                forward.convert()

    def _remove_forward(self) -> None:
        if self._forward is not None:
            self._forward.remove()

    def _rules_of_bits(self) -> tuple[Rule, ...]:
        conversions = (conversion_of(self.model), self._losses)
        tags = {
            name: tag
            for conversion in conversions
            if conversion
            for tag, _, name in conversion.catalog.layers()
        }
        return tuple(
            Rule.of(tags[layer], None, [layer], {"level": 2**bits}) for layer, bits in self.bits.items()
        )

    def _make_policy(self) -> Policy:
        """Return the policy: uniform bits, then the adapted bits by layer, then DropIT's layers."""
        if not self.config.compress_activation:
            return Policy.uniform(store="offload")
        bits = min(self.config.bit, MAX_BITS)
        rules = Policy.uniform(2**bits, group_size=self.config.group_size).rules
        return Policy((*rules, *self._adapted, *_dropit_rules(self.model)))

    def _apply(self) -> None:
        self.convert_model()
        self._enter()

    def convert_model(self) -> None:
        """Convert the model by this controller's policy."""
        self.policy = self._make_policy()
        convert(self.model, self.policy, seed=torch.initial_seed() + self.iter)

    def _enter(self) -> None:
        """Begin a step: the calls of the loss are counted from 0 again."""
        if self._losses is None or self._losses.policy is not self.policy:
            self._losses = Conversion(self.policy, Catalog.empty(), torch.initial_seed(), MIN_ELEMENTS)
        self._entered = ExitStack()
        self._entered.enter_context(entering.enter_loss(self._losses))

    def _leave(self) -> None:
        if self._entered is not None:
            self._entered.close()
            self._entered = None


class _ControllerForward(ReplacementForward):
    """Forward of a controller's model: converts the model while hooks around it call the controller.

    A copy of the model does not belong to the controller.
    """

    def __init__(self, model: nn.Module, controller: Controller) -> None:
        self.module = model
        self.controller: weakref.ref[Controller] | None = weakref.ref(controller)
        self.converted: ConvertedForward | None = None
        self.install()

    @property
    def is_converted(self) -> bool:
        """Whether the model is converted."""
        return self.converted is not None

    @property
    def is_installed(self) -> bool:
        """Whether the model's forward is this one."""
        return self.module.__dict__.get("forward") is self

    def convert(self) -> None:
        """Convert the model. Its forward is still this one, which then calls the converted forward."""
        controller = None if self.controller is None else self.controller()
        assert controller is not None
        controller.convert_model()
        wrapped = self.module.__dict__["forward"]
        assert isinstance(wrapped, ConvertedForward)
        wrapped.previous = self.previous
        self.converted = wrapped
        self.module.__dict__["forward"] = self

    def revert(self) -> None:
        """Revert the model, if it is converted."""
        if self.converted is not None:
            self.converted = None
            revert(self.module)

    def remove(self) -> None:
        """Revert the model, and restore the forward that it had."""
        self.revert()
        if self.is_installed:
            self.uninstall()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not (state.frames or inside_backward()):
            self._update()
        if self.converted is not None:
            return self.converted(*args, **kwargs)
        return self.plain(*args, **kwargs)

    def _update(self) -> None:
        """Convert the model if the innermost saved-tensor hook calls the controller; else revert it."""
        controller = None if self.controller is None else self.controller()
        wanted = controller is not None and controller.is_called_by(top_hooks())
        if wanted and self.converted is None:
            self.convert()
        elif not wanted and self.controller is not None:
            self.revert()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "controller": None}


_controllers: weakref.WeakSet[Controller] = weakref.WeakSet()


@contextmanager
def controllers_suspended(model: nn.Module) -> Iterator[None]:
    """Call `suspended` of every controller that compresses a module of `model`."""
    modules = set(model.modules())
    with ExitStack() as stack:
        for controller in list(_controllers):
            if not modules.isdisjoint(controller.model.modules()):
                stack.enter_context(controller.suspended())
        yield


def _is_filled(cell: Any) -> bool:
    """Return whether a variable of a closure has a value."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


@contextmanager
def _state_preserved(model: nn.Module) -> Iterator[None]:
    """Restore the gradients, buffers and modes of `model`, and the random states, at exit."""
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


def _dropit_rules(model: nn.Module) -> Iterator[Rule]:
    """Yield a rule for each module that DropIT compresses: it drops as before, with exact values."""
    for name, module in named_layers(model):
        dropiter: Any = module.__dict__.get("dropiter")
        if dropiter is None:
            continue
        if dropiter.strategy == "vrandom":
            warn_once(f"mesa-tune: {name!r} drops by magnitude under GACT: no policy has vrandom.")
        route = own_route(module)
        names = [name] if route is not None else [f"{name}.*"]
        keys = {"drop": dropiter.gamma, "store": "exact"}
        yield Rule.of("fc" if route is None else route.tag, None, names, keys)
