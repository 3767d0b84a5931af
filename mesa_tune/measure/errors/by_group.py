"""Gradient error within groups of parameters, and of the gradient that Adam divides by its own scale.

What is hard: Adam divides each element by √v̂ + ε, so elements with small gradients count as much as others.
Its state is that of a training, which a workload has not begun. So real steps make one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from mesa_tune.measure.errors.joint_error import Gradient, JointError
from mesa_tune.measure.errors.noise import squared
from mesa_tune.policy import Policy
from mesa_tune.profiles.own_noise import Pair
from mesa_tune.profiles.verification import GroupError
from mesa_tune.workload.preserve import preserved

STATE_STEPS = 10
"""Plain steps, on batches that measure no error, that make the optimizer's state."""


def errors_by_group(
    joint: JointError, policy: Policy, pairs: Sequence[Pair], first_draw: int
) -> list[GroupError]:
    """Return the errors of `policy` at `pairs`: of each group, and first of all parameters, named `all`.

    Groups are those of the optimizer; of an optimizer with one group, the model's top-level modules.
    `first_draw`: of the steps that make the optimizer's state. The model is as before afterwards.
    """
    with preserved(joint.model):
        optimizer = joint.workload.make_optimizer(joint.model)
        groups = {"all": joint.parameters, **_groups(joint.model, optimizer)}
        _take_steps(joint, optimizer, first_draw)
    scales = adam_scales(optimizer, joint.parameters)
    position = {parameter: index for index, parameter in enumerate(joint.parameters)}
    members = {name: [position[one] for one in group] for name, group in groups.items()}
    measured = [_errors(joint.gradients(policy, *pair), members, scales) for pair in pairs]
    return [
        GroupError(
            name,
            sum(parameter.numel() for parameter in group),
            _mean([errors[name][0] for errors in measured]),
            _mean([errors[name][1] for errors in measured]),
        )
        for name, group in groups.items()
    ]


def adam_scales(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[Tensor | None] | None:
    """Return √v̂ + ε of each parameter, None for one without state; None if `optimizer` is no Adam."""
    if not isinstance(optimizer, Adam):  # AdamW is one
        return None
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    scales = []
    for parameter in parameters:
        state = optimizer.state.get(parameter)
        scales.append(_scale(state, group_of[parameter]) if state else None)
    return scales


def _scale(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    moment = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    correction = 1 - group["betas"][1] ** float(state["step"])
    scale: Tensor = (moment.double() / correction).sqrt() + float(group["eps"])
    return scale


def _groups(model: nn.Module, optimizer: Optimizer) -> dict[str, list[nn.Parameter]]:
    """Return the trainable parameters of each group, by its name; empty groups are left out."""
    groups = optimizer.param_groups
    if len(groups) > 1:
        named = [
            (str(group.get("name", f"group {index}")), group["params"]) for index, group in enumerate(groups)
        ]
    else:
        named = list(_modules(model))
    found = [(name, [one for one in parameters if one.requires_grad]) for name, parameters in named]
    return {name: parameters for name, parameters in found if parameters}


def _modules(model: nn.Module) -> Iterator[tuple[str, list[nn.Parameter]]]:
    """Yield the top-level modules with their parameters, a shared one with the first of its modules."""
    own = list(model.parameters(recurse=False))
    yield "the model itself", own
    seen = set(own)
    for name, module in model.named_children():
        yield name, [parameter for parameter in module.parameters() if parameter not in seen]
        seen.update(module.parameters())


def _take_steps(joint: JointError, optimizer: Optimizer, first_draw: int) -> None:
    count = joint.workload.accumulation
    stepper = joint.workload.stepper(optimizer)
    for draw in range(first_draw, first_draw + STATE_STEPS):
        stepper.run(joint.model, joint.workload.make_batch(draw=draw * count), joint.exact_forward)


Errors = dict[str, tuple[float | None, float | None]]


def _errors(
    gradients: tuple[Gradient, Gradient],
    members: Mapping[str, Sequence[int]],
    scales: Sequence[Tensor | None] | None,
) -> Errors:
    """Return the two errors of each group; `gradients`: the exact one, and that under the policy."""
    exact, changed = gradients
    plain = [_squares(*pair, None) for pair in zip(exact, changed, strict=True)]
    divided: list[tuple[float, float] | None] = [None] * len(plain)
    if scales is not None:
        triples = zip(exact, changed, scales, strict=True)
        divided = [
            None if scale is None and gradient is not None else _squares(gradient, other, scale)
            for gradient, other, scale in triples
        ]
    return {
        name: (_relative([plain[index] for index in chosen]), _relative([divided[index] for index in chosen]))
        for name, chosen in members.items()
    }


def _squares(exact: Tensor | None, changed: Tensor | None, scale: Tensor | None) -> tuple[float, float]:
    """Return ‖ĝ − g‖² and ‖g‖² of one parameter, both gradients divided by `scale`."""
    pair = [None if part is None or scale is None else part.double() / scale for part in (changed, exact)]
    after, before = (changed, exact) if scale is None else pair
    size = 0.0 if before is None else squared(before)
    return (size if after is None else squared(after, before)), size


def _relative(squares: Sequence[tuple[float, float] | None]) -> float | None:
    known = [pair for pair in squares if pair is not None]
    size = sum(size for _, size in known)
    return sum(change for change, _ in known) / size if size and len(known) == len(squares) else None


def _mean(errors: Sequence[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    return statistics.fmean(known) if known and len(known) == len(errors) else None
