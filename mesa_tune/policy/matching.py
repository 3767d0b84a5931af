"""Whether a policy fits a model: every index and plain name must be a layer's, and the header this model's.

Two sides have layers, the model and the loss outside it (`loss.*`), and they are known at different times.
A rule for a side that the caller knows nothing about is not judged.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

import torch.nn.functional as F

from mesa_tune.policy.rules import MODULE, Rule, is_glob, nearest

Layer = tuple[str, int | None, str]
"""Tag, index within the tag (None while it is not known), name."""

_REMEDY: Final = "remove it, or make a policy for this model with mesa-tune search"
_OF_MODULES: Final = ("recompute",)
_LOSS: Final = "loss."
# A call's name is its module's, the function's, and the position among that function's calls.
_CALL: Final = re.compile(r"(?:(?P<module>.+)\.)?[^.]+\.[0-9]+")


class Known:
    """The layers and modules that rules may name. `complete`: calls of functions are among them."""

    def __init__(self, layers: Iterable[Layer], modules: Collection[str], complete: bool) -> None:
        self.layers = list(layers)
        self.complete = complete
        self.names: dict[str, set[str]] = {}
        self.indices: dict[str, set[int]] = {}
        for tag, index, name in self.layers:
            self.names.setdefault(tag, set()).add(name)
            self.indices.setdefault(tag, set()).update(() if index is None else (index,))
        every = {name for _, _, name in self.layers}
        self.modules = {
            *modules,
            *(name[: dot.start()] for name in every for dot in re.finditer(r"\.", name)),
            *every,
        }
        self.judges_loss = any(name.startswith(_LOSS) for name in every)
        self.judges_model = any(not f"{name}.".startswith(_LOSS) for name in {*every, *modules})

    def judges(self, name: str) -> bool:
        """True if the caller knows the side on which a layer `name` would be."""
        return self.judges_loss if name.startswith(_LOSS) else self.judges_model

    def has(self, tags: Collection[str], name: str) -> bool:
        """True if a layer of one of `tags` has `name`, or a call not yet made may get it."""
        if any(name in self.names.get(tag, ()) for tag in tags):
            return True
        return not self.complete and self._may_be_a_call(name)

    def _may_be_a_call(self, name: str) -> bool:
        """True if `name` may be that of a call in a module, or in a Python function of PyTorch there."""
        call = _CALL.fullmatch(name)
        if call is None:
            return False
        module = call["module"]
        return module is None or module in self.modules or self._is_inside(module)

    def _is_inside(self, name: str) -> bool:
        *_, function, position = ("", *name.split("."))
        return position.isdecimal() and hasattr(F, function) and self._may_be_a_call(name)


def mismatches(rules: Sequence[Rule], known: Known, source: str) -> Iterator[str]:
    """A message for every index and every name without wildcard that no known layer has."""
    for group in _of_one_line(rules):
        key = "by_index" if group[0].names is None else "by_name"
        for what, remedy in _problems(group[0], [rule.tag for rule in group], known):
            place = group[0].place(key)
            yield f"{place.says(what) if place else f'{source}: {what}'}\n{remedy}"


def _problems(rule: Rule, tags: Sequence[str], known: Known) -> Iterator[tuple[str, str]]:
    found: list[tuple[str, str] | None] = []
    if rule.names is not None:
        plain = [name for name in rule.names if not is_glob(name) and known.judges(name)]
        found = [_name_problem(tags, name, known) for name in plain]
    elif isinstance(rule.indices, tuple) and known.complete:
        found = [_index_problem(tags, index, known) for index in rule.indices]
    return (problem for problem in found if problem is not None)


def _of_one_line(rules: Sequence[Rule]) -> Iterable[list[Rule]]:
    """Rules that one condition in a section of several tags became: it must fit one of the tags."""
    groups: dict[object, list[Rule]] = {}
    for number, rule in enumerate(rules):
        groups.setdefault(rule.places or number, []).append(rule)
    return groups.values()


def _name_problem(tags: Sequence[str], name: str, known: Known) -> tuple[str, str] | None:
    if tags == [MODULE]:
        return None if name in known.modules else (f"no module {name!r}", _meant(name, known.modules))
    if known.has(tags, name):
        return None
    other = next((tag for tag, _, named in known.layers if named == name), None)
    if other is not None:
        return (
            f"{name!r} is no {_either(tags)} layer",
            f"it is a layer of the tag {other!r}: move it to `on {other}:`",
        )
    choices = [named for tag in tags for named in known.names.get(tag, ())] or [
        named for _, _, named in known.layers
    ]
    return f"no {_either(tags)} layer {name!r}", _meant(name, choices)


def _index_problem(tags: Sequence[str], index: int, known: Known) -> tuple[str, str] | None:
    there = {index for tag in tags for index in known.indices.get(tag, ())}
    # With no layer of the loss at hand, indices of that tag are those of another call's layers.
    if index in there or not known.judges_model or ("loss" in tags and not there):
        return None
    if not there:
        return (
            f"no {_either(tags)} layer has index {index}",
            f"this model has no {_either(tags)} layers: {_REMEDY}",
        )
    span = f"{min(there)} to {max(there)}" if len(there) > 1 else f"{min(there)} only"
    return f"no {_either(tags)} layer has index {index}", f"their indices in this model are {span}: {_REMEDY}"


def _either(tags: Sequence[str]) -> str:
    return " or ".join(tags)


def _meant(name: str, choices: Iterable[str]) -> str:
    near = nearest(name, sorted(choices))
    return f"did you mean {near!r}? Else {_REMEDY}" if near else _REMEDY


def unavailable(rules: Sequence[Rule]) -> Iterator[str]:
    """A message for every setting that cannot be carried out (Rule 9)."""
    for rule in rules:
        places = dict(rule.places)
        for key, value in rule.keys:
            if key == "store" and value in _OF_MODULES and rule.tag != MODULE:
                what = f"`{key}: {value}` is for whole modules"
                says = places[key].says(what) if key in places else f"{what} (on {rule.tag})"
                yield f"{says}\nname the module in a section `on module:` with `by_name`"
