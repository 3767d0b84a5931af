"""`Policy`: an ordered list of rules, layers to settings, read from and written to policy.txt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesa_tune.errors import PolicyError
from mesa_tune.policy.matching import Layer, Names, TaggedLayers, bound_rules, mismatches, unavailable
from mesa_tune.policy.parser import dump_text, parse_text
from mesa_tune.policy.rules import MODULE, NO_HEADER, Header, Rule, finest, fold, is_glob, suggestion
from mesa_tune.policy.settings import EXACT, KEYS, TAGS, LayerSettings, Value
from mesa_tune.units import counted, shorten

__all__ = ["Header", "Policy", "Rule"]

# Characters that end a word in policy.txt.
_SHOWN = 20
"""Rules that a notebook shows."""
_SEPARATORS = frozenset(" \t\n\r\v\f,:#")


@dataclass(frozen=True, eq=False)
class Policy:
    """An ordered list of rules. Later rules win key by key; a layer that no rule binds stays exact.

    `is_mesa`: the rules have Mesa's defaults. `warnings`: messages about the file, for its reader. `source`:
    the file's name, for messages. Two policies are equal if they have the same rules in each tag, whatever
    their headers say.
    """

    rules: tuple[Rule, ...] = ()
    header: Header = NO_HEADER
    is_mesa: bool = False
    warnings: tuple[str, ...] = ()
    source: str = "policy"

    @staticmethod
    def uniform(level: int = 256, **settings: Any) -> Policy:
        """Return a policy with one rule for all layers of each tag. `settings`: more keys of policy.txt.

        `tile` is for losses, and is in no other rule.
        Raise PolicyError for an unknown key or a value outside its range.
        """
        for key in settings:
            if key not in KEYS:
                raise PolicyError(f"unknown setting {key!r}\n{suggestion(key, KEYS, 'settings are')}")
        try:
            keys = _keys_of(LayerSettings.from_dict({"level": level, **settings}), exact_is_disabled=False)
        except ValueError as error:
            raise PolicyError(f"uniform policy: {error}") from None
        others = {key: value for key, value in keys.items() if key != "tile"}
        return Policy(tuple(Rule.of(tag, "all", None, keys if tag == "loss" else others) for tag in TAGS))

    @staticmethod
    def from_assignments(
        assignments: Iterable[tuple[str, int | None, str, LayerSettings]], header: Header | None = None
    ) -> Policy:
        """Return the policy that gives each layer (tag, index, name) exactly its settings.

        A tag whose layers all have the same settings gets one rule for `all`; otherwise layers of equal
        settings share a rule that lists them. Layers that are not listed stay exact. A negative index means
        that no policy can name the layer: such layers are skipped.
        """
        by_tag: dict[str, dict[LayerSettings, dict[str, int | None]]] = {tag: {} for tag in TAGS}
        for tag, index, name, settings in assignments:
            if index is not None and index < 0:
                continue
            stored = EXACT if settings.exact else settings
            by_tag.setdefault(tag, {}).setdefault(stored, {})[name] = index
        rules = [rule for tag, groups in by_tag.items() for rule in _rules_of(tag, groups)]
        return Policy(tuple(rules), header or NO_HEADER)

    def rerunning(self, modules: Mapping[str, LayerSettings]) -> Policy:
        """Return the policy in which `modules` also run again, with inputs stored by these settings."""
        groups: dict[LayerSettings, list[str]] = {}
        for name, settings in modules.items():
            groups.setdefault(settings, []).append(name)
        policy = self
        for settings, names in groups.items():
            policy = policy.with_settings(MODULE, names, settings)
        return policy

    def with_settings(self, section: str, names: Iterable[str], settings: LayerSettings) -> Policy:
        """Return the policy with a rule more: the layers `names` of the tag `section` have these settings.

        `section` "module": whole modules.
        """
        globs = list(names) if section == MODULE else [_as_glob(name) for name in names]
        rule = Rule.of(section, None, globs, _keys_of(settings, exact_is_disabled=False))
        return replace(self, rules=(*self.rules, rule))

    @staticmethod
    def parse(text: str, *, source: str = "policy.txt") -> Policy:
        """Return the policy in the `text` of a policy file, ours or Mesa's.

        Raise PolicyError with `source`, the line's number and text, and a remedy.
        """
        parsed = parse_text(text, source)
        return Policy(parsed.rules, parsed.header, parsed.mesa, parsed.warnings, source)

    @staticmethod
    def load(path: str | Path) -> Policy:
        """Return the policy in the file `path`. Raise PolicyError as in `parse`, or if it cannot be read."""
        from mesa_tune.policy.files import read_text

        return Policy.parse(read_text(Path(path)), source=str(path))

    def dumps(self) -> str:
        """Return the text of a policy file that `parse` reads as an equal policy, with the same header."""
        return dump_text(self.rules, self.header, mesa=self.is_mesa)

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the policy to the file `path`, atomically.

        Raise PolicyError if it cannot be written. Without `force`, raise it too if the file exists and was
        not written by `save`, or was edited since.
        """
        from mesa_tune.policy.files import write_text

        write_text(Path(path), self.dumps(), force=force)

    def settings(self, tag: str, index: int | None, name: str) -> LayerSettings:
        """Return the settings of the layer `name`, which has `index` within `tag`; exact if no rule binds it.

        With `index` None (a call whose index is still unknown): the finest that any index would give it.
        """
        if self._stays_exact(name):
            return EXACT
        rules = [rule for rule in self.rules if rule.tag == tag]
        indices = [index] if index is not None else _possible_indices(rules)
        bound = [[rule for rule in rules if rule.binds(index, name)] for index in indices]
        candidates = [fold(chosen, mesa=self.is_mesa) for chosen in bound if chosen]
        return finest(candidates) if candidates else EXACT

    def assignment(self, layers: Sequence[tuple[str, int, str]] | TaggedLayers) -> dict[str, LayerSettings]:
        """Return what `settings` gives each of `layers` (tag, index, name), by name."""
        layers = layers if isinstance(layers, TaggedLayers) else TaggedLayers.of(layers)
        chosen: dict[tuple[int, ...], LayerSettings] = {(): EXACT}
        settings = {}
        for name, positions in bound_rules(self.rules, layers).items():
            if positions not in chosen:
                chosen[positions] = fold([self.rules[position] for position in positions], mesa=self.is_mesa)
            settings[name] = chosen[positions]
        if self.module_rules():
            settings |= {name: EXACT for name in settings if self._stays_exact(name)}
        return settings

    def _stays_exact(self, name: str) -> bool:
        """Return whether `on module:` leaves everything inside a module around `name` exact."""
        module = self.module_settings(name)
        return module is not None and module.exact

    def module_rules(self) -> tuple[Rule, ...]:
        """Return the rules for whole modules (`on module:`)."""
        return tuple(rule for rule in self.rules if rule.tag == MODULE)

    def module_settings(self, name: str) -> LayerSettings | None:
        """Return what `on module:` sets for the module `name` or one that contains it; None if nothing."""
        rules = [rule for rule in self.module_rules() if rule.covers(name)]
        return fold(rules, mesa=False) if rules else None

    def recomputed(self, name: str) -> LayerSettings | None:
        """Return the settings of the module `name` if it runs again in backward (`store: recompute`, `tile`).

        Of the modules that one glob matches, only the outermost run again.
        """
        settings = self.module_settings(name)
        if settings is None or not settings.enable or (settings.store != "recompute" and settings.tile == 1):
            return None
        rules = (rule for rule in self.module_rules() if rule.reruns)
        return settings if any(rule.starts_at(name) for rule in rules) else None

    def reruns(self, layers: Iterable[str]) -> list[str]:
        """Return the modules around `layers` that run again in backward (`store: recompute`)."""
        if not self.module_rules():
            return []
        dotted = (f"{name}." for name in layers)
        modules = dict.fromkeys(name[:end] for name in dotted for end, c in enumerate(name) if c == ".")
        return [module for module in modules if self.recomputed(module) is not None]

    def bind_attention(self) -> Policy:
        """Return the policy for a model that calls scaled_dot_product_attention.

        In a Mesa policy the rules for all matmul and all softmax layers bind `attention` as well, with a
        warning. Without such rules, or if the policy is not Mesa's, return the policy itself.
        """
        rules = [rule for rule in self.rules if rule.tag in {"matmul", "softmax"} and _binds_all(rule)]
        if not self.is_mesa or not rules:
            return self
        tags = " and ".join(dict.fromkeys(rule.tag for rule in rules))
        why = "the model calls scaled_dot_product_attention"
        text = f"{self.source}: {why}, so the rules for all {tags} layers bind 'attention' as well"
        bound = tuple(replace(rule, tag="attention") for rule in rules)
        return replace(self, rules=bound + self.rules, warnings=(*self.warnings, text))

    def check(
        self,
        layers: Iterable[Layer],
        *,
        fingerprint: str | None = None,
        force: bool = False,
        complete: bool = True,
        modules: Collection[str] = (),
        source: str | None = None,
        skipped: Collection[str] = (),
    ) -> tuple[str, ...]:
        """Raise PolicyError if the policy is another model's, or names a layer that is not among `layers`.

        `layers` are (tag, index, name); `modules` are names of modules. `complete=False`: calls of functions
        are still unknown, so any index is accepted, and any name of a call in one of `modules`. `skipped`:
        modules that have not run yet. With `force` nothing is raised, and the messages are returned.
        """
        shown = source or self.source
        problems = (
            []
            if fingerprint is None or self.header.is_for(fingerprint)
            else [self._foreign(fingerprint, shown, _FOREIGN)]
        )
        problems += mismatches(self.rules, Names(layers, modules, complete, skipped), shown)
        if problems and not force:
            raise PolicyError(problems[0])
        return tuple(problems)

    def require_model(self, fingerprint: str, remedy: str) -> None:
        """Raise PolicyError, ending in `remedy`, if the header has another model's fingerprint."""
        if not self.header.is_for(fingerprint):
            raise PolicyError(self._foreign(fingerprint, self.source, remedy))

    def require_available(self) -> None:
        """Raise PolicyError for settings that cannot take effect."""
        for text in unavailable(self.rules):
            raise PolicyError(text)

    def unmatched(self, layers: Iterable[Layer], skipped: Collection[str] = ()) -> tuple[str, ...]:
        """Return a message for every index and name without wildcard that none of all `layers` has.

        But for layers of modules that have not run yet, `skipped`.
        """
        return self.check(layers, force=True, skipped=skipped)

    def _repr_html_(self) -> str:
        from mesa_tune.notebook import note, shown, table

        rows = [[rule.tag, shorten(rule.layers_text, 60), rule.keys_text] for rule in self.rules[:_SHOWN]]
        rest = len(self.rules) - len(rows)
        lines = [line.lstrip("# ") for line in self.header.lines()]
        further = [counted(rest, "further rule")] if rest > 0 else []
        return shown(
            "Policy", table(["on", "layers", "settings"], rows, left=3), note("; ".join([*further, *lines]))
        )

    def _foreign(self, fingerprint: str, source: str, remedy: str) -> str:
        what = f"made for another model (this model's layers are {fingerprint[:16]})"
        line = self.header.source_line
        return f"{line.message(what) if line else f'{source}: {what}'}\n{remedy}"

    def _normalized(self) -> tuple[bool, frozenset[tuple[str, tuple[Rule, ...]]]]:
        tags = {rule.tag for rule in self.rules}
        by_tag = frozenset(
            (tag, tuple(_sorted(rule) for rule in self.rules if rule.tag == tag)) for tag in tags
        )
        return self.is_mesa and bool(self.rules), by_tag

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self._normalized() == other._normalized()

    def __hash__(self) -> int:
        return hash(self._normalized())


_FOREIGN = "make one for this model with mesa-tune search, or apply it anyway with force=True"


def _sorted(rule: Rule) -> Rule:
    return rule if rule.names is None else replace(rule, names=tuple(sorted(rule.names)))


def _binds_all(rule: Rule) -> bool:
    return rule.indices == "all" and rule.names is None


def _possible_indices(rules: Iterable[Rule]) -> list[int]:
    """Return every index that a rule lists, and one that no rule lists."""
    named = {index for rule in rules if isinstance(rule.indices, tuple) for index in rule.indices}
    return [*sorted(named), max(named, default=-1) + 1]


def _keys_of(settings: LayerSettings, *, exact_is_disabled: bool = True) -> dict[str, Value]:
    if exact_is_disabled and settings.exact:
        return {"enable": False}
    # `enable: True` is our default but not Mesa's, so it is always written.
    return {"enable": settings.enable, **settings.to_dict()}


def _rules_of(tag: str, groups: dict[LayerSettings, dict[str, int | None]]) -> Iterable[Rule]:
    for settings, layers in groups.items():
        keys = _keys_of(settings)
        if len(groups) == 1:
            yield Rule.of(tag, "all", None, keys)
            continue
        indices = [index for index in layers.values() if index is not None]
        # A model that is one layer has the name "", which cannot be written in a line.
        names = None if "" in layers else [_as_glob(name) for name in layers]
        yield Rule.of(tag, indices or None, names, keys)


def _as_glob(name: str) -> str:
    """Return a glob that matches `name`. A separator becomes `?`; everything else matches itself only."""
    if not is_glob(name) and not _SEPARATORS & set(name):
        return name
    return "".join("?" if c in _SEPARATORS else f"[{c}]" if c in "*?[" else c for c in name)
