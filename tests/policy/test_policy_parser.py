"""policy.txt: every kind of mistake, Mesa's own files, and what Mesa's parser makes of ours."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesa_tune.errors import PolicyError
from mesa_tune.policy import Policy
from mesa_tune.policy.policy import Header
from mesa_tune.policy.settings import EXACT, MESA_TAGS, TAGS, LayerSettings

FILES = Path(__file__).parents[1] / "policies"
OURS = "# mesa-tune policy 1\n"
Mistake = tuple[str, int, str, str]  # a file, the line of its mistake, what is said of it, and the remedy
RULE = "on fc:\n  by_index: all\n  level: 16\n"

# Refused whether the file is Mesa's or ours; line 1 is the first after our first line.
FC, MODULE = "on fc:\n  by_index: 1\n", "on module:\n  by_name: a\n"
MISTAKES: list[Mistake] = [
    *((f"{FC}  {key}: 16\n", 3, f"unknown key '{key}'", "'level'") for key in ("lvel", "Level")),
    ("on fc:\n  by_indx: all\n", 2, "unknown key 'by_indx'", "'by_index'"),
    ("on fcc:\n  by_index: all\n", 1, "unknown tag 'fcc'", "did you mean 'fc'"),
    ("on gelu rellu:\n", 1, "unknown tag 'rellu'", "did you mean 'relu'"),
    ("on fc:\n  by_tag: cnv\n", 2, "unknown tag 'cnv'", "did you mean 'conv'"),
    ("on:\n  by_index: all\n", 1, "a section without a tag", "fc, conv"),
    ("on fc: all\n", 1, "text after the section's colon", "lines of their own"),
    (FC + "  level 16\n", 3, "no colon", "`<key>: <value>`"),
    ("on fc\n  by_index: all\n", 1, "no colon", "`on <tag>:`"),
    (FC + "  level:\n", 3, "level without a value", "2 to 256"),
    (RULE + "  drop: 0.1 0.2\n", 4, "2 values for drop", "0 to below 1"),
    *(
        (f"{FC}  level: {value}\n", 3, f"bad value '{value}", "2 to 256")
        for value in ("many", "1", 257, 10**399)
    ),
    (RULE + "  group_size: 0\n", 4, "bad value '0' for group_size", "1 or more"),
    (RULE + "  quant_groups: -1\n", 4, "bad value '-1'", "1 or more"),
    (RULE + "  tile: 0\n", 4, "bad value '0' for tile", "1 or more"),
    (RULE + "  enable: 1\n", 4, "bad value '1' for enable", "True or False"),
    (RULE + "  enable: FALSE\n", 4, "bad value 'FALSE'", "did you mean 'False'"),
    *((f"{RULE}  ema_decay: {value}\n", 4, f"bad value '{value}'", "below 1") for value in ("1", "nan")),
    (RULE + "  rows: 0\n", 4, "bad value '0' for rows", "above 0, 1 at most"),
    (RULE + "  rows: 0.1\n  drop: 0.5\n", 4, "rows beside drop 0.5", "leave one of them"),
    (RULE + "  drop: 1.0\n", 4, "bad value '1.0' for drop", "below 1"),
    (RULE + "  rounding: stocastic\n", 4, "bad value 'stocastic'", "'stochastic'"),
    (RULE + "  allocation: samples\n", 4, "bad value 'samples' for allocation", "'sample'"),
    (RULE + "  store: recomput\n", 4, "bad value 'recomput' for store", "'recompute'"),
    *((f"on fc:\n  by_index: {index}\n", 2, f"'{index}' is no index", "0 3 5") for index in ("first", "1.5")),
    ("on fc:\n  by_index: al\n", 2, "'al' is no index", "did you mean 'all'"),
    ("on fc:\n  by_index: 0 -1\n", 2, "index -1 is below 0", "from 0"),
    ("on fc:\n  by_index: all 3\n", 2, "`all` beside indices", "not both"),
    (RULE + "  group_size: 64\n  quant_groups: 3\n", 5, "both group_size", "keep one"),
    ("on module fc:\n", 1, "'module' beside other tags", "`on module:`"),
    ("on module:\n  by_index: 1\n  enable: False\n", 2, "by_index in", "write by_name"),
    (MODULE + "  store: derive\n", 3, "a store", "store: recompute"),
    (MODULE + "  level: 4\n", 2, "without store or enable", "store: "),
]

# Passed over by Mesa, and so by us in its files, with a warning; mistakes in ours.
FLAWS: list[Mistake] = [
    ("level: 16\n" + RULE, 1, "'level' before any section", "`on fc:`"),
    ("on fc:\n  level: 16\n", 2, "before any by_index or by_name", "by_index: all"),
    ("on fc:\n  by_tag: fc\n  level: 4\n", 2, "a rule without by_index", "by_index: all"),
    (RULE + "\n  by_index: 3\n", 5, "a rule without settings", "level: 16"),
    ("on fc:\n  by_index:\n  level: 4\n", 2, "by_index without a value", "`all`"),
    ("on fc:\n  by_name:\n  level: 4\n", 2, "by_name without a value", "globs"),
    (FC + "  by_tag: bn\n  level: 4\n", 2, "excludes", "a tag of"),
    (FC + "  level: 16: 4\n", 3, "text after a second colon", "one key"),
]


def refusal(text: str) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text, source="some/policy.txt")
    return str(caught.value).splitlines()


def assert_names_the_line(message: str, text: str, line: int, said: str) -> None:
    assert message.startswith(f"some/policy.txt:{line}: ")
    assert said in message
    assert text.splitlines()[line - 1].strip()[:40] in message


def assert_refused(text: str, line: int, said: str, remedy: str) -> None:
    message, *rest = refusal(text)
    assert_names_the_line(message, text, line, said)
    assert remedy in " ".join(rest)
    assert 1 <= len(rest) <= 2


@pytest.mark.parametrize(("text", "line", "said", "remedy"), MISTAKES, ids=[row[2][:60] for row in MISTAKES])
def test_a_mistake_is_refused_with_line_text_and_remedy(text: str, line: int, said: str, remedy: str) -> None:
    assert_refused(text, line, said, remedy)  # in Mesa's file
    assert_refused(OURS + text, line + 1, said, remedy)


@pytest.mark.parametrize(("text", "line", "said", "remedy"), FLAWS, ids=[case[2] for case in FLAWS])
def test_what_mesa_passes_over_is_refused_in_our_file_and_a_warning_in_mesas(
    text: str, line: int, said: str, remedy: str
) -> None:
    assert_refused(OURS + text, line + 1, said, remedy)
    warning = Policy.parse(text, source="some/policy.txt").warnings[0]
    assert_names_the_line(warning, text, line, said)


def test_every_kind_of_mistake_has_a_message_of_its_own() -> None:
    kinds = {refusal(OURS + text)[0].split(": ", 1)[1] for text, *_ in MISTAKES + FLAWS}
    assert len(kinds) == len(MISTAKES + FLAWS)


def test_a_policy_of_a_newer_version_is_refused() -> None:
    message, remedy = refusal("# mesa-tune policy 2\non fc:\n")
    assert message == "some/policy.txt:1: unknown version '2' in \"# mesa-tune policy 2\""
    assert "update mesa-tune" in remedy


def test_a_bad_line_is_shown_shortened_and_without_control_characters() -> None:
    assert "binary data" in refusal("on fc:\0\0")[0]
    message = refusal(OURS + "on fc:\n  by_index: all\n  \x1b[31mlevel: 4\n")[0]
    assert "\x1b" not in message
    assert "\\x1b[31mlevel" in message
    assert len(refusal(OURS + f"on fc:\n  by_index: {'x' * 30} {'1 ' * 5000}\n")[0]) < 250


@pytest.mark.parametrize("text", ["", "\n \n", "# nothing\n", OURS, "on fc:\n"], ids=repr)
def test_an_empty_file_switches_everything_off(text: str) -> None:
    policy = Policy.parse(text)
    assert policy.rules == ()
    assert {policy.settings(tag, index, "a") for tag in TAGS for index in (0, None)} == {EXACT}


def test_our_file_of_the_documentation() -> None:
    policy = Policy.load(FILES / "ours.txt")
    assert not policy.is_mesa
    assert policy.warnings == ()
    predicted = "peak 5.71 GB, gradient error 3.1e-04, noise ratio 0.02, step 1.06x"
    assert policy.header == Header("deit_tiny", "8f3c0a11", "2.13.0", 128, "6.0 GB", predicted)
    assert policy.settings("fc", 9, "blocks.0.mlp.fc1") == LayerSettings(level=16)
    assert policy.settings("fc", 9, "blocks.0.mlp.fc2") == LayerSettings(level=4)
    assert policy.settings("fc", 9, "head").exact
    assert policy.settings("softmax", 0, "a") == LayerSettings(group_size=None, quant_groups=3, ema_decay=0.9)
    attention = LayerSettings(level=10, rounding="nearest", drop=0.5, store="derive")
    assert policy.settings("attention", 1, "blocks.1.attn.x.0") == attention


# Mesa's files.


def mesa(**given: object) -> LayerSettings:
    defaults: dict[str, object] = {"enable": False, "ema_decay": 0.9, "group_size": None, "quant_groups": 1}
    return LayerSettings(**{**defaults, **given})  # type: ignore[arg-type]


def test_mesas_file_has_mesas_defaults() -> None:
    policy = Policy.parse("on fc:\n  by_index: all\n  level: 64\n\n  by_index: 1\n  enable: True\n")
    assert policy.is_mesa
    assert policy.settings("fc", 0, "a") == mesa(level=64)
    assert policy.settings("fc", 1, "a") == mesa(level=64, enable=True)


def test_the_file_of_mesas_own_documentation() -> None:
    policy = Policy.load(FILES / "mesa_readme.txt")
    assert policy.is_mesa
    assert policy.warnings == ()
    assert [policy.settings("gelu", index, "a").exact for index in range(4)] == [False, True, True, False]
    assert policy.settings("gelu", 0, "a") == mesa(enable=True)


def test_several_tags_tabs_commas_and_keys_in_any_order() -> None:
    policy = Policy.load(FILES / "mesa_tabs.txt")
    for tag in ("gelu", "relu"):
        assert policy.settings(tag, 5, "a") == mesa(enable=True, level=16, ema_decay=0.8)
        assert policy.settings(tag, 2, "a") == mesa(enable=True, level=64, ema_decay=0.8)
    assert [policy.settings("relu", index, "a").exact for index in range(3)] == [True, True, False]
    assert not policy.settings("gelu", 0, "a").exact
    assert policy.settings("matmul", 0, "a") == mesa(enable=True, quant_groups=3)
    said = "\n".join(policy.warnings)
    assert "Mesa's key 'stable' means nothing here" in said
    assert "Mesa's section 'eltwise' means nothing here" in said
    assert ":3: counts for nothing, as in Mesa: 'level' before any by_index" in said


def test_only_the_last_section_of_a_tag_counts_in_mesas_file() -> None:
    policy = Policy.load(FILES / "mesa_repeated.txt")
    assert policy.settings("fc", 0, "a") == EXACT
    assert policy.settings("fc", 2, "a") == mesa(enable=True)
    assert policy.settings("conv", 0, "a") == mesa(enable=True, level=16)
    assert policy.settings("bn", 0, "a") == policy.settings("layernorm", 0, "a") == EXACT
    for said in ("another section for 'fc'", "triggers mean nothing"):
        assert any(said in warning for warning in policy.warnings)


def test_every_section_of_a_tag_counts_in_ours() -> None:
    text = "on fc:\n  by_index: all\n  level: 16\non fc:\n  by_index: 2\n  enable: False\n"
    policy = Policy.parse(OURS + text)
    assert policy.settings("fc", 2, "a") == LayerSettings(level=16, enable=False)
    assert "Mesa reads only the last one" in policy.warnings[0]


def test_lines_that_stop_mesas_parser_are_read_on_with_a_warning() -> None:
    policy = Policy.parse("on fc:\n\t# a comment\n\tby_index: all\n\t\n\tenable: True\n")
    assert policy.settings("fc", 0, "a").enable
    assert [warning.split(": ")[0] for warning in policy.warnings] == ["policy.txt:2", "policy.txt:4"]


def test_a_misplaced_first_line_is_told() -> None:
    policy = Policy.parse("# my policy\n# mesa-tune policy 1\n" + RULE)
    assert policy.is_mesa
    assert "our first line is not the first" in policy.warnings[0]


@pytest.mark.parametrize(
    "text", ["\n\n" + OURS + RULE, "\ufeff" + OURS + RULE, (OURS + RULE).replace("\n", "\r\n")]
)
def test_our_first_line_is_known_through_blank_lines_and_foreign_line_ends(text: str) -> None:
    assert Policy.parse(text) == Policy.parse(OURS + RULE)


def test_a_repeated_key_is_told_and_the_last_one_counts() -> None:
    policy = Policy.parse(OURS + RULE + "  level: 4\n")
    assert policy.settings("fc", 0, "a").level == 4
    assert "a second 'level' in one rule" in policy.warnings[0]


def test_attention_takes_mesas_rules_for_all_matmul_and_softmax() -> None:
    policy = Policy.parse(
        "on matmul:\n  by_index: all\n  enable: True\n  level: 64\n\n  by_index: 0\n  level: 16\n"
        "on softmax:\n  by_index: all\n  quant_groups: 3\n"
    )
    bound = policy.bind_attention()
    assert policy.settings("attention", 0, "a") == EXACT
    assert bound.settings("attention", 0, "a") == mesa(enable=True, level=64, quant_groups=3)
    assert bound.settings("matmul", 0, "a") == policy.settings("matmul", 0, "a")
    assert "scaled_dot_product_attention" in bound.warnings[-1]
    assert Policy.parse(bound.dumps()) == bound


@pytest.mark.parametrize(
    "text",
    [OURS + "on matmul:\n  by_index: all\n  level: 4\n", "on matmul:\n  by_index: 0\n  enable: True\n", RULE],
)
def test_attention_is_left_alone_by_our_files_and_by_rules_for_some(text: str) -> None:
    policy = Policy.parse(text)
    assert policy.bind_attention() is policy


# A reader by Mesa's rules, written apart from ours, to hold ours against.


def mesa_pairs(text: str) -> Iterator[tuple[str, str]]:
    """Key and value of every line that Mesa's parser gets to."""
    for raw in text.split("\n"):
        line = raw.strip(" ")
        if line == "" or line.startswith("#"):
            continue
        key, *rest = line.split("#")[0].split(":")
        if not rest:
            return
        yield key.strip(), rest[0].strip()


def mesa_rules(text: str, tag: str) -> list[dict[str, str]]:
    """The rules that Mesa's parser finds for `tag`: conditions and settings, as text."""
    found: list[dict[str, str]] = []
    reading = settled = False
    for key, value in mesa_pairs(text):
        if "on" in key.split():
            reading = tag in key.split()
            found, settled = ([], False) if reading else (found, settled)
        elif reading and "by_" in key and (settled or not found):
            found.append({key: value})
            settled = False
        elif reading and found:
            found[-1][key] = value
            settled = settled or "by_" not in key
    return [rule for rule in found if any("by_" not in key for key in rule)]


def listed(value: str) -> list[str]:
    return [item.strip() for item in value.split(",")] if "," in value else value.split()


def mesa_settings(text: str, tag: str, index: int) -> dict[str, str]:
    """The attributes that Mesa's rules give the layer `index` of `tag`, as text."""
    state = {"enable": "False", "level": "256", "ema_decay": "0.9", "quant_groups": "1"}
    for rule in mesa_rules(text, tag):
        bound = rule.get("by_index")
        if bound is None or not (bound == "all" or str(index) in listed(bound)):
            continue
        if "by_tag" in rule and tag not in listed(rule["by_tag"]):
            continue
        state.update((key, value) for key, value in rule.items() if key in state)
    return state


def assert_mesa_agrees(text: str, tag: str, index: int, found: LayerSettings) -> None:
    """Mesa's rules in the text give the layer the settings `found`."""
    state = mesa_settings(text, tag, index)
    assert found.enable is (state["enable"] not in {"False", "false"})
    if found.enable:
        assert found.level == int(state["level"])
        assert found.ema_decay == float(state["ema_decay"])
        assert found.quant_groups == int(state["quant_groups"])


@st.composite
def mesa_lines(draw: st.DrawFn) -> Iterator[str]:
    """A section in Mesa's format, with what its users may write in it."""
    tags = draw(st.lists(st.sampled_from(["fc", "gelu", "relu"]), min_size=1, max_size=2, unique=True))
    indent = draw(st.sampled_from(["", "  ", "\t", "    "]))
    numbers = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(lambda many: [str(one) for one in many])
    separator = draw(st.sampled_from([" ", ",", ", "]))
    line = st.one_of(
        st.just("by_index: all"),
        numbers.map(lambda many: "by_index: " + separator.join(many)),
        st.sampled_from(["by_tag: relu", "by_tag: fc gelu", "by_tag: gelu"]),
        st.sampled_from(["enable: True", "enable: true", "enable: False", "enable: false"]),
        st.sampled_from(["level: 16", "level:4", "level : 200", "ema_decay: 0.5", "quant_groups: 3"]),
        st.sampled_from(["clip_val: 3", "stable: -1", "# level: 2"]),
    )
    comment = st.sampled_from(["", "", " # why: because", "#x"])
    blank = st.sampled_from(["", "", "\n", "  \n"])
    lines = draw(st.lists(st.tuples(line, comment, blank), min_size=1, max_size=10))
    lines = draw(st.sampled_from([[], [("by_index: all", "", ""), ("enable: True", "", "")]])) + lines
    body = [("" if text.startswith("#") else indent) + text + note + "\n" + gap for text, note, gap in lines]
    return iter(["on " + " ".join(tags) + ":\n", *body])


@given(st.lists(mesa_lines(), min_size=1, max_size=3))
def test_files_mean_what_they_mean_in_mesa(sections: list[Iterator[str]]) -> None:
    text = "".join(line for section in sections for line in section)
    policy = Policy.parse(text)
    for tag in ("fc", "gelu", "relu"):
        for index in range(4):
            assert_mesa_agrees(text, tag, index, policy.settings(tag, index, "a"))


FINE = LayerSettings(level=16, group_size=None, quant_groups=3, ema_decay=0.9)
COARSE = LayerSettings(level=4, group_size=None, quant_groups=2, ema_decay=0.5)
ASSIGNED = [
    (tag, index, f"blocks.{index}.{tag}", settings)
    for tag in MESA_TAGS
    for index, settings in enumerate([FINE, COARSE, EXACT, FINE])
]


@pytest.mark.parametrize(
    "policy",
    [Policy.from_assignments(ASSIGNED), Policy.uniform(16, quant_groups=3, ema_decay=0.5), Policy()],
    ids=["assigned", "uniform", "empty"],
)
def test_mesas_parser_reads_what_we_write(policy: Policy) -> None:
    text = policy.dumps()
    for tag in MESA_TAGS:
        for index in range(4):
            assert_mesa_agrees(text, tag, index, policy.settings(tag, index, f"blocks.{index}.{tag}"))


def test_what_we_write_has_nothing_that_stops_mesas_parser() -> None:
    for policy in (Policy.uniform(16), Policy.from_assignments(ASSIGNED), Policy.load(FILES / "ours.txt")):
        lines = [line for line in policy.dumps().split("\n") if line.strip(" ") and not line.startswith("#")]
        assert all(":" in line and "\t" not in line for line in lines)
        headings = [line.split(":")[0].split() for line in lines if line.startswith("on ")]
        assert all(len(heading) == 2 for heading in headings)
        assert len(headings) == len({heading[1] for heading in headings})


@pytest.mark.parametrize("name", ["ours", "mesa_readme", "mesa_tabs", "mesa_repeated", "empty"])
def test_example_files_survive_the_way_to_text_and_back(name: str) -> None:
    policy = Policy.load(FILES / f"{name}.txt")
    again = Policy.parse(policy.dumps())
    assert (again, again.header) == (policy, policy.header)


def test_a_key_that_means_nothing_here_still_ends_its_rule() -> None:
    text = "on fc gelu:\n by_index: 0\n by_tag: gelu\n stable: -1\n by_index: all\n enable: True\n"
    policy = Policy.parse(text)
    assert [policy.settings(tag, 3, "a").enable for tag in ("fc", "gelu")] == [True, True]
    assert mesa_settings(text, "fc", 3)["enable"] == "True"
