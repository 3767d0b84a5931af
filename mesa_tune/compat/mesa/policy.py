"""`ms.policy`: torch's layers turned into Mesa's, and policies deployed on them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mesa_tune.compat.layers import become, keepers_of_torch, name_layers, warn_left_alone
from mesa_tune.compat.mesa import layers as ms
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
_WITHOUT: dict[type[nn.Module], type[nn.Module]] = {
    nn.GELU: ms.GELU,
    nn.Softmax: ms.Softmax,
    nn.ReLU: ms.ReLU,
}
_TRIGGERED = ("'epoch'", "'iteration'", "'init'", "triggers")


def convert_by_num_groups(module: nn.Module, num_groups: int) -> None:
    """torch's layers below `module` become Mesa's, in place, with `num_groups` groups.

    Where `num_groups` does not divide the channels, with the most that does, and a warning says so.
    """
    _convert(module, lambda channels: num_groups, num_groups)


def convert_by_group_size(module: nn.Module, hidden_group_size: int) -> None:
    """torch's layers below `module` become Mesa's, in place, with `hidden_group_size` channels a group.

    As in Mesa, GELU, Softmax and ReLU stay torch's, since their channels are not known; a warning names them.
    """
    _convert(module, lambda channels: max(1, channels // hidden_group_size), None)


def _convert(model: nn.Module, groups_of: Callable[[int], int], groups_else: int | None) -> None:
    for name, child in list(model.named_modules())[1:]:
        kind = type(child)
        if kind in _WITH_CHANNELS:
            made, channels_of = _WITH_CHANNELS[kind]
            channels = channels_of(child)
            _start(child, made, _dividing(channels, groups_of(channels), name))
        elif kind in _WITHOUT and groups_else is not None:
            _start(child, _WITHOUT[kind], groups_else)
    name_layers(model)
    warn_left_alone(model, keepers_of_torch(model), "Mesa's conversion has no layer for them")


def _start(child: nn.Module, kind: type[nn.Module], groups: int) -> None:
    device = next((parameter.device for parameter in child.parameters()), None)
    made = become(child, kind)
    assert isinstance(made, ms.Quantizer)
    made.start(groups)
    for key in ("clip_val", "shift", "iteration"):
        setattr(made, key, getattr(made, key).to(device))


def _dividing(channels: int, groups: int, name: str) -> int:
    """The largest divisor of `channels` that is at most `groups`."""
    found = next(count for count in range(min(groups, channels), 0, -1) if channels % count == 0)
    if found != groups:
        warn_once(f"mesa-tune: {name!r} gets {found} groups: {groups} do not divide its {channels} channels.")
    return found


def _layers(model: nn.Module) -> Iterator[tuple[str, int, str, Any]]:
    """Tag, index, name and layer, each tag counted in the order of `model.modules()`."""
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, (ms._Layer, ms.MatMul)):
            index = counts.get(module.tag, 0)
            counts[module.tag] = index + 1
            yield module.tag, index, name, module


def deploy_on_init(
    model: nn.Module, filename: str | Path, verbose: Print = print, override_verbose: bool = False
) -> None:
    """Numbers the layers of `model` by tag, and sets their attributes as the policy file says.

    Mesa's file or one of ours. For `""` layers are numbered, nothing is compressed, and a warning says so.
    `verbose` is called with what happens; `override_verbose` makes it the layers' own, too. Raises
    PolicyError for a file that is missing or no policy; warns of indices and names that no layer has.
    """
    policy = None if _is_none(filename) else Policy.load(filename)
    found = list(_layers(model))
    for text in () if policy is None else _flaws(policy, model, found):
        warn_once(text)
    name_layers(model)
    for tag, index, name, layer in found:
        if override_verbose:
            for part in getattr(layer, "operands", (layer,)):
                part.verbose = verbose
        layer.update_quantization_parameter(index=index)
        for keys in () if policy is None else _keys(policy, tag, index, name):
            layer.update_quantization_parameter(by_index="all", **keys)
    verbose(f"deployed {filename} on {len(found)} layers")


def _is_none(filename: str | Path) -> bool:
    """Whether no policy is given, as Mesa's programs do by default; warns if so."""
    if filename == "":
        warn_once("mesa-tune: no policy file is given (''), so Mesa's layers compress nothing.")
    return filename == ""


def _flaws(policy: Policy, model: nn.Module, found: Sequence[tuple[str, int, str, Any]]) -> list[str]:
    texts = [text for text in policy.warnings if not any(word in text for word in _TRIGGERED)]
    if not found:
        what = f"{policy.source}: {type(model).__name__} has no layer of Mesa's"
        return [*texts, f"{what}: convert_by_num_groups makes them"]
    return [*texts, *policy.unmatched([(tag, index, name) for tag, index, name, _ in found])]


def _keys(policy: Policy, tag: str, index: int, name: str) -> Iterator[dict[str, Any]]:
    """What to set, rule by rule: a rule of Mesa's leaves alone what it does not name."""
    rules = [rule for rule in policy.rules if rule.tag == tag and rule.binds(index, name)]
    if policy.is_mesa:
        yield from (dict(rule.keys) for rule in rules)
    elif rules:
        settings = policy.settings(tag, index, name)
        given = {key: getattr(settings, key) for key in KEYS if getattr(settings, key) is not None}
        yield given if settings.enable else {"enable": False}


def read_policy(
    filename: str | Path, section: str = "init", debug: bool = False, verbose: Print = print
) -> Policies:
    """The rules of a section as Mesa gives them, for `deploy_on_epoch`: text by key.

    The first item holds the `trigger` (the numbers behind `on <section>:`) and the section's name. Empty if
    there is no such section, or no file is given (`""`). Raises PolicyError if the file cannot be read.
    """
    policies: Policies = []
    inside = False
    for key, value in () if _is_none(filename) else _lines(read_text(Path(filename)), str(filename)):
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
    """Sets attributes as `policies` (of `read_policy`) say, if `epoch` is among the section's triggers.

    Rules of a section that is a tag bind layers of that tag alone; those of `on epoch: 0 10` bind every tag.
    `optimizer` is there for Mesa's signature: no range is learned, so no momentum has to be reset.
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
    """`deploy_on_epoch` for the sections that count iterations."""
    deploy_on_epoch(model, policies, iteration, optimizer, verbose)
