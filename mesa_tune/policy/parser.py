"""Parser and writer of policy.txt, in Mesa's line format.

The hard part: Mesa's parser ignores much without a message, such as settings above the first `by_` line,
rules without `by_index`, and all but the last section of a tag. In a Mesa file these are ignored too, with a
warning; in a file of ours they are errors. What makes Mesa's parser fail, and keys unknown to both projects,
are errors in both kinds of file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, NamedTuple

from mesa_tune.errors import PolicyError
from mesa_tune.policy.rules import MODULE, Header, Indices, Rule, SourceLine, suggestion
from mesa_tune.policy.settings import KEYS, TAGS, Value, beside_rows
from mesa_tune.policy.values import CONDITIONS, allowed_values, read_indices, read_value, split_words

FIRST_LINE: Final = "# mesa-tune policy 1"
_FIRST_LINE_PATTERN: Final = re.compile(r"#\s*mesa-tune\s+policy\s+(\S+)\s*")
_NEWER: Final = (
    "this mesa-tune reads version 1: update mesa-tune, or make the policy again with mesa-tune search"
)

# Section names in Mesa's parser that no layer of its released code has, and further keys that Mesa reads.
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
    """Content of a policy file."""

    rules: tuple[Rule, ...]
    header: Header
    mesa: bool
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Draft:
    """A rule while it is read. `setting_count` includes ignored settings: they too end its condition."""

    start: SourceLine
    setting_count: int = 0
    conditions: dict[str, list[str]] = field(default_factory=dict)
    settings: dict[str, Value] = field(default_factory=dict)
    source_lines: dict[str, SourceLine] = field(default_factory=dict)


@dataclass(slots=True)
class _Section:
    line: SourceLine
    tags: tuple[str, ...]
    drafts: list[_Draft] = field(default_factory=list)


def parse_text(text: str, source: str) -> Parsed:
    """Parse the `text` of a policy file; `source` is the file's name for messages.

    Raise PolicyError, which names the line, for what is neither Mesa's format nor ours.
    """
    if "\0" in text:
        raise PolicyError(
            f"{source}: not a policy, but binary data\na policy is text such as `on fc:` (see policy.txt)"
        )
    texts = re.split(r"\r\n|\n|\r", text.removeprefix("\ufeff"))
    lines = [SourceLine(source, number, text) for number, text in enumerate(texts, start=1)]
    start = next((index for index, text in enumerate(texts) if text.strip()), 0)
    mesa = not _is_ours(lines[start])
    reader = _Reader(mesa)
    for line in lines:
        reader.read(line)
    header = Header() if mesa else Header.read(takewhile(_is_comment, lines[start + 1 :]))
    return Parsed(tuple(reader.rules()), header, mesa, tuple(reader.warnings))


def _is_ours(line: SourceLine) -> bool:
    match = _FIRST_LINE_PATTERN.fullmatch(line.text.strip())
    if match and match[1] != "1":
        raise line.error(f"unknown version {match[1]!r}", _NEWER)
    return match is not None


def _is_comment(line: SourceLine) -> bool:
    return line.text.strip().startswith("#")


class _Reader:
    """Collector of sections, line by line; `rules` turns them into rules."""

    def __init__(self, mesa: bool) -> None:
        self.mesa = mesa
        self.warnings: list[str] = []
        self.sections: list[_Section] = []

    def read(self, line: SourceLine) -> None:
        content = line.text.partition("#")[0]
        if not content.strip():
            self._skip(line)
            return
        if ":" not in content:
            remedy = "write `on <tag>:` or `<key>: <value>`, or begin a comment with #"
            raise line.error("no colon", f"{remedy} (Mesa's parser stops at such a line)")
        key, value, *rest = (part.strip() for part in content.split(":"))
        if rest:
            self._ignore(line, "text after a second colon", "write one key and its value a line")
        if "on" in key.split():
            self._open(line, [word for word in key.split() if word != "on"], value)
        elif not self.sections:
            self._ignore(line, f"{key!r} before any section", "begin with a section such as `on fc:`")
        elif self.sections[-1].tags:
            self._add(line, key, split_words(value))

    def _skip(self, line: SourceLine) -> None:
        if line.number > 1 and _FIRST_LINE_PATTERN.fullmatch(line.text.strip()) and self.mesa:
            self._warn(line, "our first line is not the first, so the file is read as Mesa's")
        rest = line.text.strip(" ")
        if self.mesa and rest and not rest.startswith("#"):
            # Mesa strips only spaces, then finds no colon, and stops reading without a message.
            self._warn(line, "skipped, but Mesa's own parser stops at the tab")

    def _open(self, line: SourceLine, words: list[str], trigger: str) -> None:
        if not words:
            raise line.error("a section without a tag", f"write one of: {', '.join(TAGS)}")
        tags = [word for word in words if self._is_tag(line, word)]
        if MODULE in words and len(words) > 1:
            raise line.error(
                f"{MODULE!r} beside other tags", "give modules a section of their own: `on module:`"
            )
        if trigger and not (self.mesa and re.fullmatch(r"[0-9\s]+", trigger)):
            raise line.error("text after the section's colon", "put keys on lines of their own, below")
        if trigger:
            self._warn(line, "Mesa's triggers mean nothing here")
        for tag in tags:
            self._warn_of_repetition(line, tag)
        self.sections.append(_Section(line, tuple(dict.fromkeys(tags))))

    def _is_tag(self, line: SourceLine, word: str) -> bool:
        if word in TAGS or word == MODULE:
            return True
        if not (self.mesa and word in MESA_SECTIONS):
            raise line.error(f"unknown tag {word!r}", suggestion(word, [*TAGS, MODULE], "tags are"))
        self._warn(line, f"Mesa's section {word!r} means nothing here")
        return False

    def _warn_of_repetition(self, line: SourceLine, tag: str) -> None:
        if any(tag in section.tags for section in self.sections):
            ours = "the rules above it count for nothing" if self.mesa else "here all of them count"
            self._warn(line, f"another section for {tag!r}: Mesa reads only the last one; {ours}")

    def _add(self, line: SourceLine, key: str, words: list[str]) -> None:
        drafts = self.sections[-1].drafts
        if key.startswith("by_"):
            if not drafts or drafts[-1].setting_count:
                drafts.append(_Draft(line))
            self._add_condition(drafts[-1], line, key, words)
        elif not drafts:
            self._ignore(
                line, f"{key!r} before any by_index or by_name", "begin each rule with `by_index: all` or so"
            )
        else:
            drafts[-1].setting_count += 1
            self._add_setting(drafts[-1], line, key, words)

    def _add_condition(self, draft: _Draft, line: SourceLine, key: str, words: list[str]) -> None:
        if key not in CONDITIONS:
            raise line.error(f"unknown key {key!r}", suggestion(key, CONDITIONS, "conditions are"))
        if not words:
            self._ignore(line, f"{key} without a value", f"write {allowed_values(key)}")
            # Mesa has no key by_name, so an empty one does not change the rule.
            if key == "by_name":
                return
        if key in draft.conditions:
            self._warn(line, f"a second {key} in one condition: the last one counts")
        for word in words if key == "by_tag" else ():
            self._is_tag(line, word)
        if key == "by_index":
            read_indices(line, words)
        draft.conditions[key], draft.source_lines[key] = words, line

    def _add_setting(self, draft: _Draft, line: SourceLine, key: str, words: list[str]) -> None:
        if self.mesa and key in MESA_KEYS:
            self._warn(line, f"Mesa's key {key!r} means nothing here")
            return
        if key not in KEYS:
            remedy = suggestion(key, [*CONDITIONS, *KEYS], "keys are")
            raise line.error(f"unknown key {key!r}", remedy)
        if key in draft.settings:
            self._warn(line, f"a second {key!r} in one rule: the last one counts")
        draft.settings[key], draft.source_lines[key] = read_value(line, key, words), line

    def _ignore(self, line: SourceLine, what: str, remedy: str) -> None:
        """Report what Mesa ignores: warn in a file of Mesa's, raise in one of ours."""
        if not self.mesa:
            raise line.error(what, remedy)
        self._warn(line, f"counts for nothing, as in Mesa: {what}")

    def _warn(self, line: SourceLine, what: str) -> None:
        text = line.message(what)
        if text not in self.warnings:
            self.warnings.append(text)

    def rules(self) -> Iterable[Rule]:
        """Yield the rules of all sections, one per tag, in the order of the file."""
        for position, section in enumerate(self.sections):
            later = (
                {tag for below in self.sections[position + 1 :] for tag in below.tags} if self.mesa else set()
            )
            for draft in section.drafts:
                for tag in self._bound_tags(section, draft):
                    if tag not in later:
                        yield _finish(tag, draft)

    def _bound_tags(self, section: _Section, draft: _Draft) -> list[str]:
        """Return the tags for which a draft is a rule; none if it can bind no layer."""
        names, indices = draft.conditions.get("by_name"), draft.conditions.get("by_index")
        tags = draft.conditions.get("by_tag", section.tags)
        bound = [tag for tag in section.tags if tag in tags]
        if not draft.setting_count:
            self._ignore(
                draft.start, "a rule without settings", "give it a key such as `level: 16`, or remove it"
            )
        elif names is None and indices is None:
            self._ignore(draft.start, "a rule without by_index or by_name", "write `by_index: all` or so")
        elif not bound:
            self._ignore(draft.start, "a by_tag that excludes its own section", "name a tag of the section")
        elif draft.settings and (names or indices):
            return bound
        return []


def _finish(tag: str, draft: _Draft) -> Rule:
    if {"group_size", "quant_groups"} <= draft.settings.keys():
        lines = (draft.source_lines["group_size"], draft.source_lines["quant_groups"])
        remedy = "keep one of them in a rule: they replace each other"
        raise max(lines, key=lambda line: line.number).error("both group_size and quant_groups", remedy)
    if others := beside_rows(draft.settings):
        text = f"rows beside {', '.join(others)}"
        raise draft.source_lines["rows"].error(text, "leave one of them out of the rule")
    if tag == MODULE:
        _check_module_rule(draft)
    indices: Indices | None = None
    if words := draft.conditions.get("by_index"):
        indices = read_indices(draft.source_lines["by_index"], words)
    return Rule.of(tag, indices, draft.conditions.get("by_name"), draft.settings, draft.source_lines)


def _check_module_rule(draft: _Draft) -> None:
    if "by_index" in draft.conditions:
        raise draft.source_lines["by_index"].error(
            "by_index in `on module:`", "modules have no index: write by_name"
        )
    if "store" in draft.settings and draft.settings["store"] not in _MODULE_STORES:
        raise draft.source_lines["store"].error(
            "a store that no whole module has", "write store: recompute or store: exact"
        )
    if not {"store", "enable"} & draft.settings.keys():
        remedy = "write store: recompute, store: exact or enable: False"
        raise draft.start.error("a rule for modules without store or enable", remedy)


def dump_text(rules: Iterable[Rule], header: Header, *, mesa: bool) -> str:
    """Return the text of a file that `parse_text` and Mesa's parser read as `rules`.

    One section per tag, one tag per section, by_index first, only spaces. Every line has a colon, because
    Mesa's parser stops at one without.
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
