"""`ms.policy`: convert torch's layers to Mesa's, and deploy policies on them.

What is hard: Mesa's parser accepts almost anything in silence. Here what it would ignore is an error or a
warning, and whatever it understands has the same meaning here.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mesa_tune.compat.layers import change_class, name_layers, warn_unconverted
from mesa_tune.compat.mesa import layers as ms
from mesa_tune.compat.mesa.parameters import TENSORS
from mesa_tune.errors import PolicyError
from mesa_tune.notice import warn_once
from mesa_tune.policy import Policy
from mesa_tune.policy.files import read_text
from mesa_tune.policy.settings import KEYS

Policies = list[dict[str, Any]]
Print = Callable[[str], object]

_WITH_CHANNELS: dict[type[nn.Module], tuple[type[nn.Module], Callable[[Any], int]]] = {
    nn.Linear: (ms.Linear, lambda layer: int(layer.in_features)),
    nn.Conv2d: (ms.Conv2d, lambda layer: int(layer.in_channels)),
    nn.LayerNorm: (ms.LayerNorm, lambda layer: int(layer.normalized_shape[-1])),
    nn.BatchNorm2d: (ms.BatchNorm2d, lambda layer: int(layer.num_features)),
}
_WITHOUT_CHANNELS: dict[type[nn.Module], type[nn.Module]] = {
    nn.GELU: ms.GELU,
    nn.Softmax: ms.Softmax,
    nn.ReLU: ms.ReLU,
}
_TRIGGERED = ("'epoch'", "'iteration'", "'init'", "triggers")


def convert_by_num_groups(module: nn.Module, num_groups: int) -> None:
    """Convert torch's layers inside `module` to Mesa's, in place, with `num_groups` groups each.

    A layer whose channels `num_groups` does not divide gets the largest smaller number that does, and a
    warning names it.
    """
    _convert(module, lambda channels: num_groups, num_groups)


def convert_by_group_size(module: nn.Module, hidden_group_size: int) -> None:
    """Convert torch's layers inside `module` to Mesa's, with `hidden_group_size` channels per group.

    As in Mesa, GELU, Softmax and ReLU stay torch's, because nothing tells their channels; a warning names
    them.
    """
    _convert(module, lambda channels: max(1, channels // hidden_group_size), None)


def _convert(
    model: nn.Module, groups_of_channels: Callable[[int], int], groups_without_channels: int | None
) -> None:
    for name, child in list(model.named_modules())[1:]:
        plain_class = type(child)
        if plain_class in _WITH_CHANNELS:
            mesa_class, channels_of = _WITH_CHANNELS[plain_class]
            channels = channels_of(child)
            _start(child, mesa_class, _largest_divisor(channels, groups_of_channels(channels), name))
        elif plain_class in _WITHOUT_CHANNELS and groups_without_channels is not None:
            _start(child, _WITHOUT_CHANNELS[plain_class], groups_without_channels)
    name_layers(model)
    warn_unconverted(model, "Mesa's conversion has no layer for them")


def _start(child: nn.Module, mesa_class: type[nn.Module], groups: int) -> None:
    device = next((parameter.device for parameter in child.parameters()), None)
    layer = change_class(child, mesa_class)
    assert isinstance(layer, ms.Quantizer)
    layer.start(groups)
    for key in TENSORS:
        setattr(layer, key, getattr(layer, key).to(device))


def _largest_divisor(channels: int, groups: int, name: str) -> int:
    """Return the largest divisor of `channels` that is at most `groups`; warn if it is not `groups`."""
    divisor = next(count for count in range(min(groups, channels), 0, -1) if channels % count == 0)
    if divisor != groups:
        warn_once(
            f"mesa-tune: {name!r} gets {divisor} groups: {groups} do not divide its {channels} channels."
        )
    return divisor


def _layers(model: nn.Module) -> Iterator[tuple[str, int, str, Any]]:
    """Yield tag, index, name and layer; the index counts the layers of a tag in the order of `modules()`."""
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, (ms._MesaLayer, ms.MatMul)):
            index = counts.get(module.tag, 0)
            counts[module.tag] = index + 1
            yield module.tag, index, name, module


def deploy_on_init(
    model: nn.Module, filename: str | Path, verbose: Print = print, override_verbose: bool = False
) -> None:
    """Number the layers of `model` by tag, and set their attributes as the policy file says.

    The file is Mesa's or mesa-tune's. With `""` layers are only numbered, nothing is compressed, and a
    warning says so. `verbose` is called with log messages; with `override_verbose` the layers use it, too.
    Warns of indices and names that no layer has.

    Raises:
        PolicyError: the file is missing or is no policy.
    """
    policy = None if _is_empty(filename) else Policy.load(filename)
    layers = list(_layers(model))
    for text in () if policy is None else _warnings(policy, model, layers):
        warn_once(text)
    name_layers(model)
    for tag, index, name, layer in layers:
        if override_verbose:
            for part in getattr(layer, "operands", (layer,)):
                part.verbose = verbose
        layer.update_quantization_parameter(index=index)
        for keys in () if policy is None else _keys(policy, tag, index, name):
            layer.update_quantization_parameter(by_index="all", **keys)
    verbose(f"deployed {filename} on {len(layers)} layers")


def _is_empty(filename: str | Path) -> bool:
    """Return whether `filename` is empty, the default of Mesa's programs; warn if so."""
    if filename == "":
        warn_once("mesa-tune: no policy file is given (''), so Mesa's layers compress nothing.")
    return filename == ""


def _warnings(policy: Policy, model: nn.Module, layers: Sequence[tuple[str, int, str, Any]]) -> list[str]:
    texts = [text for text in policy.warnings if not any(word in text for word in _TRIGGERED)]
    if not layers:
        what = f"{policy.source}: {type(model).__name__} has no layer of Mesa's"
        return [*texts, f"{what}: convert_by_num_groups makes them"]
    return [*texts, *policy.unmatched([(tag, index, name) for tag, index, name, _ in layers])]


def _keys(policy: Policy, tag: str, index: int, name: str) -> Iterator[dict[str, Any]]:
    """Yield the attributes to set, by rule. A rule of a Mesa file leaves all other attributes as they are."""
    rules = [rule for rule in policy.rules if rule.tag == tag and rule.binds(index, name)]
    if policy.is_mesa:
        yield from (dict(rule.keys) for rule in rules)
    elif rules:
        settings = policy.settings(tag, index, name)
        keys = {key: getattr(settings, key) for key in KEYS if getattr(settings, key) is not None}
        yield keys if settings.enable else {"enable": False}


def read_policy(
    filename: str | Path, section: str = "init", debug: bool = False, verbose: Print = print
) -> Policies:
    """Return the rules of a section for `deploy_on_epoch`, as Mesa does: one dict per rule, values as text.

    The first item has the `trigger` (the numbers after `on <section>:`) and the section's name. The list is
    empty if there is no such section or `filename` is `""`.

    Raises:
        PolicyError: the file cannot be read.
    """
    policies: Policies = []
    inside = False
    for key, value in () if _is_empty(filename) else _lines(read_text(Path(filename)), str(filename)):
        words = key.split()
        if debug:
            verbose(f"{key}: {value}")
        if "on" in words:
            inside = section in words
            if inside:
                policies = [{"trigger": [int(word) for word in value.split()], "section": section}]
        elif inside and key.startswith("by_") and (len(policies) == 1 or _has_settings(policies[-1])):
            policies.append({key: _items(value)})
        elif inside and len(policies) > 1:
            policies[-1][key] = _items(value)
    return [*policies[:1], *(rule for rule in policies[1:] if _has_settings(rule))]


def _lines(text: str, source: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if content and ":" not in content:
            raise PolicyError(f"{source}:{number}: no colon in {line.strip()!r}\nwrite `<key>: <value>`")
        if content:
            key, _, value = content.partition(":")
            yield key.strip(), value.strip()


def _items(value: str) -> str | list[str]:
    words = value.replace(",", " ").split()
    return words if len(words) > 1 else value


def _has_settings(rule: dict[str, Any]) -> bool:
    return any(not key.startswith("by_") for key in rule)


def deploy_on_epoch(
    model: nn.Module,
    policies: Policies,
    epoch: int,
    optimizer: Optimizer | None = None,
    verbose: Print = print,
) -> None:
    """Set attributes by `policies` (from `read_policy`), if `epoch` is among the section's triggers.

    Rules of a section named after a tag apply to layers of that tag only; rules of `on epoch: 0 10` apply to
    every tag. `optimizer` is unused: in Mesa it resets the momentum of learned ranges, and none is learned
    here.
    """
    if not policies:
        return
    if "trigger" not in policies[0]:
        raise PolicyError("no trigger in policies\ngive what read_policy(filename, section) returned")
    if epoch not in policies[0]["trigger"]:
        return
    section = policies[0].get("section")
    tag = section if section in {tag for tag, *_ in _layers(model)} else None
    verbose(f"deploying {len(policies) - 1} rules on {epoch}")
    for rule in policies[1:]:
        for _, _, _, layer in _layers(model):
            layer.update_quantization_parameter(**rule, section=tag)


def deploy_on_iteration(
    model: nn.Module,
    policies: Policies,
    iteration: int,
    optimizer: Optimizer | None = None,
    verbose: Print = print,
) -> None:
    """Call `deploy_on_epoch` for a section that counts iterations."""
    deploy_on_epoch(model, policies, iteration, optimizer, verbose)
