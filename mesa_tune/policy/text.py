"""policy.txt in and out: Mesa's line format, read by Mesa's rules, with a name for every mistake.

Mesa's parser passes over much in silence: settings above the first `by_` line, rules without `by_index`,
all but the last section of a tag. In a Mesa file these keep that meaning and give a warning; in a file of
ours they are mistakes. What Mesa stumbles over, and keys that neither project has, are mistakes in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, NamedTuple

from mesa_tune.errors import PolicyError
from mesa_tune.policy.rules import MODULE, Header, Indices, Place, Rule, suggestion
from mesa_tune.policy.settings import KEYS, TAGS, Value
from mesa_tune.policy.values import CONDITIONS, read_indices, read_value, words_for, words_of

FIRST_LINE: Final = "# mesa-tune policy 1"
_FIRST_LINE: Final = re.compile(r"#\s*mesa-tune\s+policy\s+(\S+)\s*")
_NEWER: Final = (
    "this mesa-tune reads version 1: update mesa-tune, or make the policy again with mesa-tune search"
)

# Tags and sections of Mesa that no layer of its released code has, and attributes that its policies can set.
MESA_SECTIONS: Final = ("eltwise", "shuffle", "concat", "norm", "init", "epoch", "iteration")
MESA_KEYS: Final = (
    *(
        "clip_val",
        "shift",
        "iteration",
        "stable",
        "correlate",
        "index",
        "tag",
        "requires_grad",
        "init_choice",
    ),
    *(
        "global_buffer",
        "level_num",
        "progressive",
        "quant_loss_function",
        "method",
        "non_negative_only",
        "trigger",
    ),
)
_MODULE_STORES: Final = ("exact", "recompute")


class Parsed(NamedTuple):
    """What a policy file says."""

    rules: tuple[Rule, ...]
    header: Header
    mesa: bool
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Draft:
    """A rule while it is read. `lines` counts settings, those that mean nothing here too: they end it."""

    start: Place
    lines: int = 0
    conditions: dict[str, list[str]] = field(default_factory=dict)
    settings: dict[str, Value] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)


@dataclass(slots=True)
class _Section:
    place: Place
    tags: tuple[str, ...]
    drafts: list[_Draft] = field(default_factory=list)


def parse_text(text: str, source: str) -> Parsed:
    """The rules and header of a policy file's `text`; `source` is the file's name for messages.

    Raises PolicyError, with the line, for what is neither Mesa's format nor ours.
    """
    if "\0" in text:
        raise PolicyError(
            f"{source}: not a policy, but binary data\na policy is text such as `on fc:` (see policy.txt)"
        )
    lines = re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff"))
    places = [Place(source, number, line) for number, line in enumerate(lines, start=1)]
    start = next((at for at, line in enumerate(lines) if line.strip()), 0)
    mesa = not _is_ours(places[start])
    reader = _Reader(mesa)
    for place in places:
        reader.read(place)
    header = Header() if mesa else Header.read(takewhile(_is_comment, places[start + 1 :]))
    return Parsed(tuple(reader.rules()), header, mesa, tuple(reader.warnings))


def _is_ours(place: Place) -> bool:
    match = _FIRST_LINE.fullmatch(place.text.strip())
    if match and match[1] != "1":
        raise place.refuse(f"unknown version {match[1]!r}", _NEWER)
    return match is not None


def _is_comment(place: Place) -> bool:
    return place.text.strip().startswith("#")


class _Reader:
    """Collects sections line by line; `rules` closes them."""

    def __init__(self, mesa: bool) -> None:
        self.mesa = mesa
        self.warnings: list[str] = []
        self.sections: list[_Section] = []

    def read(self, place: Place) -> None:
        content = place.text.partition("#")[0]
        if not content.strip():
            self._pass_over(place)
            return
        if ":" not in content:
            remedy = "write `on <tag>:` or `<key>: <value>`, or begin a comment with #"
            raise place.refuse("no colon", f"{remedy} (Mesa's parser stops at such a line)")
        key, value, *rest = (part.strip() for part in content.split(":"))
        if rest:
            self._flaw(place, "text after a second colon", "write one key and its value a line")
        if "on" in key.split():
            self._open(place, [word for word in key.split() if word != "on"], value)
        elif not self.sections:
            self._flaw(place, f"{key!r} before any section", "begin with a section such as `on fc:`")
        elif self.sections[-1].tags:
            self._add(place, key, words_of(value))

    def _pass_over(self, place: Place) -> None:
        if place.number > 1 and _FIRST_LINE.fullmatch(place.text.strip()) and self.mesa:
            self._warn(place, "our first line is not the first, so the file is read as Mesa's")
        rest = place.text.strip(" ")
        if self.mesa and rest and not rest.startswith("#"):
            # Mesa strips spaces only, finds no colon in what is left, and stops without a word.
            self._warn(place, "read on, where Mesa's own parser stops at the tab")

    def _open(self, place: Place, words: list[str], trigger: str) -> None:
        if not words:
            raise place.refuse("a section without a tag", f"write one of: {', '.join(TAGS)}")
        known = [word for word in words if self._is_tag(place, word)]
        if MODULE in words and len(words) > 1:
            raise place.refuse(
                f"{MODULE!r} beside other tags", "give modules a section of their own: `on module:`"
            )
        if trigger and not (self.mesa and re.fullmatch(r"[0-9\s]+", trigger)):
            raise place.refuse("text after the section's colon", "put keys on lines of their own, below")
        if trigger:
            self._warn(place, "Mesa's triggers mean nothing here")
        for tag in known:
            self._note_repetition(place, tag)
        self.sections.append(_Section(place, tuple(dict.fromkeys(known))))

    def _is_tag(self, place: Place, word: str) -> bool:
        if word in TAGS or word == MODULE:
            return True
        if not (self.mesa and word in MESA_SECTIONS):
            raise place.refuse(f"unknown tag {word!r}", suggestion(word, [*TAGS, MODULE], "tags are"))
        self._warn(place, f"Mesa's section {word!r} means nothing here")
        return False

    def _note_repetition(self, place: Place, tag: str) -> None:
        if any(tag in section.tags for section in self.sections):
            ours = "the rules above it count for nothing" if self.mesa else "here all of them count"
            self._warn(place, f"another section for {tag!r}: Mesa reads only the last one; {ours}")

    def _add(self, place: Place, key: str, words: list[str]) -> None:
        drafts = self.sections[-1].drafts
        if key.startswith("by_"):
            if not drafts or drafts[-1].lines:
                drafts.append(_Draft(place))
            self._add_condition(drafts[-1], place, key, words)
        elif not drafts:
            self._flaw(
                place, f"{key!r} before any by_index or by_name", "begin each rule with `by_index: all` or so"
            )
        else:
            drafts[-1].lines += 1
            self._add_setting(drafts[-1], place, key, words)

    def _add_condition(self, draft: _Draft, place: Place, key: str, words: list[str]) -> None:
        if key not in CONDITIONS:
            raise place.refuse(f"unknown key {key!r}", suggestion(key, CONDITIONS, "conditions are"))
        if not words:
            self._flaw(place, f"{key} without a value", f"write {words_for(key)}")
            # Mesa knows no by_name, so an empty one takes nothing from the rule.
            if key == "by_name":
                return
        if key in draft.conditions:
            self._warn(place, f"a second {key} in one condition: the last one counts")
        for word in words if key == "by_tag" else ():
            self._is_tag(place, word)
        if key == "by_index":
            read_indices(place, words)
        draft.conditions[key], draft.places[key] = words, place

    def _add_setting(self, draft: _Draft, place: Place, key: str, words: list[str]) -> None:
        if self.mesa and key in MESA_KEYS:
            self._warn(place, f"Mesa's key {key!r} means nothing here")
            return
        if key not in KEYS:
            remedy = suggestion(key, [*CONDITIONS, *KEYS], "keys are")
            raise place.refuse(f"unknown key {key!r}", remedy)
        if key in draft.settings:
            self._warn(place, f"a second {key!r} in one rule: the last one counts")
        draft.settings[key], draft.places[key] = read_value(place, key, words), place

    def _flaw(self, place: Place, what: str, remedy: str) -> None:
        """What Mesa passes over in silence: a warning in a file of Mesa's, a mistake in one of ours."""
        if not self.mesa:
            raise place.refuse(what, remedy)
        self._warn(place, f"counts for nothing, as in Mesa: {what}")

    def _warn(self, place: Place, what: str) -> None:
        text = place.says(what)
        if text not in self.warnings:
            self.warnings.append(text)

    def rules(self) -> Iterable[Rule]:
        """The rules of all sections, one a tag, in the order of the file."""
        for position, section in enumerate(self.sections):
            later = (
                {tag for other in self.sections[position + 1 :] for tag in other.tags} if self.mesa else set()
            )
            for draft in section.drafts:
                for tag in self._bound_tags(section, draft):
                    if tag not in later:
                        yield _finish(tag, draft)

    def _bound_tags(self, section: _Section, draft: _Draft) -> list[str]:
        """The tags for which a draft is a rule; none if it can bind nothing."""
        names, indices = draft.conditions.get("by_name"), draft.conditions.get("by_index")
        tags = draft.conditions.get("by_tag", section.tags)
        bound = [tag for tag in section.tags if tag in tags]
        if not draft.lines:
            self._flaw(
                draft.start, "a rule without settings", "give it a key such as `level: 16`, or remove it"
            )
        elif names is None and indices is None:
            self._flaw(draft.start, "a rule without by_index or by_name", "write `by_index: all` or so")
        elif not bound:
            self._flaw(draft.start, "a by_tag that excludes its own section", "name a tag of the section")
        elif draft.settings and (names or indices):
            return bound
        return []


def _finish(tag: str, draft: _Draft) -> Rule:
    if {"group_size", "quant_groups"} <= draft.settings.keys():
        place = max(draft.places["group_size"], draft.places["quant_groups"], key=lambda place: place.number)
        raise place.refuse(
            "both group_size and quant_groups", "keep one of them in a rule: they replace each other"
        )
    if tag == MODULE:
        _check_module_rule(draft)
    indices: Indices | None = None
    if words := draft.conditions.get("by_index"):
        indices = read_indices(draft.places["by_index"], words)
    return Rule.of(tag, indices, draft.conditions.get("by_name"), draft.settings, draft.places)


def _check_module_rule(draft: _Draft) -> None:
    if "by_index" in draft.conditions:
        raise draft.places["by_index"].refuse(
            "by_index in `on module:`", "modules have no index: write by_name"
        )
    if "store" in draft.settings and draft.settings["store"] not in _MODULE_STORES:
        raise draft.places["store"].refuse(
            "a store that no whole module has", "write store: recompute or store: exact"
        )
    if not {"store", "enable"} & draft.settings.keys():
        remedy = "write store: recompute, store: exact or enable: False"
        raise draft.start.refuse("a rule for modules without store or enable", remedy)


def dump_text(rules: Iterable[Rule], header: Header, *, mesa: bool) -> str:
    """A file that `parse_text` and Mesa's parser read as `rules`.

    One section a tag and one tag a section, by_index first, spaces only, no line without a colon: Mesa's
    parser stops at one.
    """
    by_tag: dict[str, list[Rule]] = {}
    for rule in rules:
        by_tag.setdefault(rule.tag, []).append(rule)
    sections = [
        f"on {tag}:\n" + "\n".join("".join(_rule_lines(rule)) for rule in by_tag[tag]) for tag in by_tag
    ]
    top = "" if mesa else "".join(f"{line}\n" for line in [FIRST_LINE, *header.lines()])
    return top + "\n".join(sections)


def _rule_lines(rule: Rule) -> Iterable[str]:
    if rule.indices is not None:
        yield f"    by_index: {rule.indices if rule.indices == 'all' else ' '.join(map(str, rule.indices))}\n"
    if rule.names is not None:
        yield f"    by_name: {' '.join(rule.names)}\n"
    for key, value in rule.keys:
        yield f"    {key}: {value}\n"
