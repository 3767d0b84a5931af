"""Check that a policy fits a model: every index and every name without wildcard must be a layer's.

The hard part: the layers of the model and those of the loss outside it (`loss.*`) are found at different
times. A rule for layers that the caller has not found yet cannot be checked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch.nn.functional as F

from mesa_tune.policy.rules import MODULE, Rule, is_glob, nearest

Layer = tuple[str, int | None, str]
"""Tag, index within the tag (None as long as it is unknown), name."""

_REMEDY: Final = "remove it, or make a policy for this model with mesa-tune search"
_OF_MODULES: Final = ("recompute",)
_TILED: Final = ("loss", MODULE)
_LOSS: Final = "loss."
# The name of a call: module, function, and position among that function's calls.
_CALL: Final = re.compile(r"(?:(?P<module>.+)\.)?[^.]+\.[0-9]+")


class TaggedLayers(NamedTuple):
    """Names of layers, and by tag the index of each name."""

    names: tuple[str, ...]
    indices: Mapping[str, Mapping[str, int]]

    @staticmethod
    def of(layers: Sequence[tuple[str, int, str]]) -> TaggedLayers:
        """Return the index of `layers` (tag, index, name)."""
        indices: dict[str, dict[str, int]] = {}
        for tag, index, name in layers:
            indices.setdefault(tag, {})[name] = index
        return TaggedLayers(tuple([name for _, _, name in layers]), indices)


def bound_rules(rules: Sequence[Rule], layers: TaggedLayers) -> dict[str, tuple[int, ...]]:
    """Return for the name of each of `layers` the positions of the rules of its tag that bind it."""
    bound: dict[str, tuple[int, ...]] = dict.fromkeys(layers.names, ())
    for position, rule in enumerate(rules):
        for name in rule.bound(layers.indices.get(rule.tag, {})):
            bound[name] += (position,)
    return bound


class Names:
    """Layers and modules that rules may name. `complete`: calls of functions are among them.

    `skipped`: modules that have not run yet, of whose calls nothing is known.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        modules: Collection[str],
        complete: bool,
        skipped: Collection[str] = (),
    ) -> None:
        self.layers = list(layers)
        self.complete, self.skipped = complete, frozenset(skipped)
        self.by_tag: dict[str, set[str]] = {}
        self.indices: dict[str, set[int]] = {}
        for tag, index, name in self.layers:
            self.by_tag.setdefault(tag, set()).add(name)
            self.indices.setdefault(tag, set()).update(() if index is None else (index,))
        names = {name for _, _, name in self.layers}
        self.modules = {
            *modules,
            *(module for name in names for module in around(name)),
            *names,
        }
        self.has_loss = any(name.startswith(_LOSS) for name in names)
        self.has_model = any(not f"{name}.".startswith(_LOSS) for name in {*names, *modules})

    def can_check(self, name: str) -> bool:
        """Return True if there are layers of the part that `name` belongs to: the loss or the model.

        Not of a module that has not run yet.
        """
        if not self.skipped.isdisjoint(around(name)):
            return False
        return self.has_loss if name.startswith(_LOSS) else self.has_model

    def has(self, tags: Collection[str], name: str) -> bool:
        """Return True if a layer of one of `tags` has `name`, or a call that has not run yet may have it."""
        if any(name in self.by_tag.get(tag, ()) for tag in tags):
            return True
        return not self.complete and self._may_be_a_call(name)

    def _may_be_a_call(self, name: str) -> bool:
        """Return True if `name` can be a call in a module, or inside one of PyTorch's Python functions."""
        call = _CALL.fullmatch(name)
        if call is None:
            return False
        module = call["module"]
        return module is None or module in self.modules or self._is_inside(module)

    def _is_inside(self, name: str) -> bool:
        *_, function, position = ("", *name.split("."))
        return position.isdecimal() and hasattr(F, function) and self._may_be_a_call(name)


def around(name: str) -> Iterator[str]:
    """Yield what may be modules around a layer: all beginnings of its name that end before a dot."""
    return (name[: dot.start()] for dot in re.finditer(r"\.", name))


def mismatches(rules: Sequence[Rule], names: Names, source: str) -> Iterator[str]:
    """Yield a message for every index and every name without wildcard that no layer has."""
    for group in _by_condition(rules):
        key = "by_index" if group[0].names is None else "by_name"
        for what, remedy in _problems(group[0], [rule.tag for rule in group], names):
            line = group[0].source_line(key)
            yield f"{line.message(what) if line else f'{source}: {what}'}\n{remedy}"


def _problems(rule: Rule, tags: Sequence[str], names: Names) -> Iterator[tuple[str, str]]:
    problems: list[tuple[str, str] | None] = []
    if rule.names is not None:
        plain = [name for name in rule.names if not is_glob(name) and names.can_check(name)]
        problems = [_name_problem(tags, name, names) for name in plain]
    elif isinstance(rule.indices, tuple) and names.complete and not names.skipped:
        problems = [_index_problem(tags, index, names) for index in rule.indices]
    return (problem for problem in problems if problem is not None)


def _by_condition(rules: Sequence[Rule]) -> Iterable[list[Rule]]:
    """Group the rules that one condition in a section of several tags gave: it must fit one of the tags."""
    groups: dict[object, list[Rule]] = {}
    for number, rule in enumerate(rules):
        groups.setdefault(rule.source_lines or number, []).append(rule)
    return groups.values()


def _name_problem(tags: Sequence[str], name: str, names: Names) -> tuple[str, str] | None:
    if tags == [MODULE]:
        return None if name in names.modules else (f"no module {name!r}", _meant(name, names.modules))
    if names.has(tags, name):
        return None
    actual = next((tag for tag, _, layer in names.layers if layer == name), None)
    if actual is not None:
        return (
            f"{name!r} is no {_either(tags)} layer",
            f"it is a layer of the tag {actual!r}: move it to `on {actual}:`",
        )
    choices = [layer for tag in tags for layer in names.by_tag.get(tag, ())] or [
        layer for _, _, layer in names.layers
    ]
    return f"no {_either(tags)} layer {name!r}", _meant(name, choices)


def _index_problem(tags: Sequence[str], index: int, names: Names) -> tuple[str, str] | None:
    indices = {index for tag in tags for index in names.indices.get(tag, ())}
    # Without layers of the loss, indices of the tag `loss` may belong to layers of another call.
    if index in indices or not names.has_model or ("loss" in tags and not indices):
        return None
    if not indices:
        return (
            f"no {_either(tags)} layer has index {index}",
            f"this model has no {_either(tags)} layers: {_REMEDY}",
        )
    span = f"{min(indices)} to {max(indices)}" if len(indices) > 1 else f"{min(indices)} only"
    return f"no {_either(tags)} layer has index {index}", f"their indices in this model are {span}: {_REMEDY}"


def _either(tags: Sequence[str]) -> str:
    return " or ".join(tags)


def _meant(name: str, choices: Iterable[str]) -> str:
    near = nearest(name, sorted(choices))
    return f"did you mean {near!r}? Else {_REMEDY}" if near else _REMEDY


def unavailable(rules: Sequence[Rule]) -> Iterator[str]:
    """Yield a message for every setting that cannot take effect (Rule 9)."""
    for rule in rules:
        for key, value in rule.keys:
            misplaced = _misplaced(rule.tag, key, value)
            if misplaced is not None:
                what, remedy = misplaced
                line = rule.source_line(key)
                text = line.message(what) if line else f"{what} (on {rule.tag})"
                yield f"{text}\n{remedy}"


def _misplaced(tag: str, key: str, value: object) -> tuple[str, str] | None:
    """Return what is wrong with a setting on layers of `tag`, and the remedy; None if it fits them."""
    if key == "store" and value in _OF_MODULES and tag != MODULE:
        return f"`{key}: {value}` is for whole modules", (
            "name the module in a section `on module:` with `by_name`"
        )
    if key == "tile" and value != 1 and tag not in _TILED:
        return f"`{key}: {value}` is for losses and whole modules", (
            "write it in a section `on loss:`, or name the module in `on module:` with `by_name`"
        )
    return None
