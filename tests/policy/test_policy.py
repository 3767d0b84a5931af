"""Policy: which rule binds which layer, what rules give together, and the way to text and back."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesa_tune.errors import PolicyError
from mesa_tune.policy import Policy
from mesa_tune.policy.policy import Header, Rule
from mesa_tune.policy.settings import EXACT, TAGS, LayerSettings

OURS = "# mesa-tune policy 1\n"

names = st.lists(st.text("abz019", min_size=1, max_size=3), min_size=1, max_size=4).map(".".join)
globs = st.one_of(names, st.sampled_from(["*", "blocks.*", "b?.x", "blocks.[01].*", "[*]a"]))
indices = st.one_of(st.just("all"), st.lists(st.integers(0, 99), min_size=1, max_size=5), st.none())
keys = st.fixed_dictionaries(
    {},
    optional={
        "enable": st.booleans(),
        "level": st.integers(2, 256),
        "ema_decay": st.floats(0, 1, exclude_max=True),
        "rounding": st.sampled_from(["stochastic", "nearest"]),
        "drop": st.floats(0, 1, exclude_max=True),
        "allocation": st.sampled_from(["uniform", "sample"]),
        "store": st.sampled_from(["quantize", "exact", "derive", "recompute", "offload"]),
    },
)
groupings = st.sampled_from([{}, {"group_size": 64}, {"group_size": 1024}, {"quant_groups": 3}])


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Any rule that a policy file can hold."""
    chosen: dict[str, Any] = {**draw(keys), **draw(groupings)}
    bound = draw(indices)
    named = draw(st.lists(globs, min_size=1, max_size=4)) if bound is None or draw(st.booleans()) else None
    return Rule.of(draw(st.sampled_from(TAGS)), bound, named, chosen or {"level": 16})


policies = st.builds(
    lambda chosen, mesa: Policy(tuple(chosen), is_mesa=mesa), st.lists(rules(), max_size=8), st.booleans()
)


def ours(text: str) -> Policy:
    return Policy.parse(OURS + text)


@given(policies)
def test_parsing_what_was_dumped_gives_an_equal_policy(policy: Policy) -> None:
    again = Policy.parse(policy.dumps())
    assert again == policy
    assert hash(again) == hash(policy)
    assert again.warnings == ()
    assert again.dumps() == policy.dumps()


@given(policies, st.sampled_from(TAGS), st.one_of(st.none(), st.integers(0, 100)), names)
def test_parsing_what_was_dumped_gives_the_same_settings(
    policy: Policy, tag: str, index: int | None, name: str
) -> None:
    assert Policy.parse(policy.dumps()).settings(tag, index, name) == policy.settings(tag, index, name)


@given(st.integers(2, 256), groupings)
def test_a_uniform_policy_binds_every_layer_and_survives_text(level: int, grouping: dict[str, int]) -> None:
    policy = Policy.uniform(level, **grouping)
    group_size = None if "quant_groups" in grouping else grouping.get("group_size", 256)
    wanted = LayerSettings(level=level, group_size=group_size, quant_groups=grouping.get("quant_groups"))
    assert Policy.parse(policy.dumps()) == policy
    assert {policy.settings(tag, index, "a.b") for tag in TAGS for index in (0, 7, None)} == {wanted}


UNIFORM_MISTAKES = {
    "did you mean 'level'": {"levl": 16},
    "level must be an integer from 2 to 256, but got 1": {"level": 1},
    "exactly one of": {"group_size": 64, "quant_groups": 2},
}


@pytest.mark.parametrize("said", UNIFORM_MISTAKES)
def test_a_uniform_policy_with_bad_settings_is_refused(said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        Policy.uniform(**UNIFORM_MISTAKES[said])


def test_a_uniform_policy_can_switch_everything_off() -> None:
    assert Policy.uniform(enable=False).settings("fc", 0, "fc").exact
    assert Policy.uniform(store="exact").settings("fc", 0, "fc").exact


def test_no_rule_leaves_a_layer_alone() -> None:
    policy = ours("on fc:\n  by_index: 1\n  level: 16\n")
    assert policy.settings("fc", 0, "head") == EXACT
    assert policy.settings("gelu", 1, "act") == EXACT
    assert policy.settings("fc", 1, "head") == LayerSettings(level=16)
    assert Policy().settings("fc", 0, "head") == EXACT


def test_later_rules_win_key_by_key() -> None:
    policy = ours(
        "on fc:\n  by_index: all\n  level: 16\n  ema_decay: 0.5\n  group_size: 64\n\n"
        "  by_index: 3 5\n  level: 4\n\n  by_index: 5\n  enable: False\n  level: 8\n"
    )
    assert policy.settings("fc", 0, "a") == LayerSettings(level=16, ema_decay=0.5, group_size=64)
    assert policy.settings("fc", 3, "a") == LayerSettings(level=4, ema_decay=0.5, group_size=64)
    assert policy.settings("fc", 5, "a") == LayerSettings(level=8, ema_decay=0.5, group_size=64, enable=False)


def test_group_size_and_quant_groups_replace_each_other() -> None:
    policy = ours(
        "on fc:\n  by_index: all\n  quant_groups: 3\n\n  by_index: 1 2\n  group_size: 64\n\n"
        "  by_index: 2\n  quant_groups: 6\n"
    )
    found = [policy.settings("fc", index, "a") for index in (0, 1, 2)]
    assert [(one.group_size, one.quant_groups) for one in found] == [(None, 3), (64, None), (None, 6)]


def test_a_rule_with_both_conditions_binds_by_name() -> None:
    policy = ours("on fc:\n  by_index: 3\n  by_name: a.fc1 b.*\n  level: 4\n")
    assert policy.settings("fc", 0, "a.fc1").level == 4
    assert policy.settings("fc", 0, "b.mlp.fc2").level == 4
    assert policy.settings("fc", 3, "c.fc1") == EXACT


def test_names_are_case_sensitive_and_match_whole() -> None:
    policy = ours("on fc:\n  by_name: Head fc?\n  level: 4\n")
    found = [policy.settings("fc", 0, name).exact for name in ("Head", "fc1", "head", "fc10")]
    assert found == [False, False, True, True]


FINEST: dict[str, tuple[str, str, dict[str, Any]]] = {  # rules of all layers and of layer 3: what both allow
    "most-levels": ("all\n level: 16", "3\n level: 64\n group_size: 1024", {"level": 64}),
    "exact-beats-all": ("all\n level: 16", "3\n enable: False", {"level": 16, "enable": False}),
    "no-rule-for-all": ("0\n level: 4", "0 1\n level: 16", {"level": 16}),
    "a-rule-by-name-for-another": ("all\n level: 16", "3\n by_name: z.fc\n level: 256", {"level": 16}),
    "a-rule-by-name-for-this": ("all\n level: 256", "3\n by_name: a.fc\n level: 4", {"level": 4}),
    "most-rows": ("all\n level: 4\n rows: .1", "3\n level: 16\n rows: .5", {"level": 16, "rows": 0.5}),
    "all-rows-and-nothing-dropped": ("all\n drop: .1", "3\n drop: 0\n rows: .5", {}),
    "most-groups": ("all\n quant_groups: 2\n drop: .5", "3\n quant_groups: 8\n drop: 0", {"quant_groups": 8}),
}


@pytest.mark.parametrize(("first", "second", "finest"), FINEST.values(), ids=FINEST)
def test_a_layer_without_index_gets_the_finest(first: str, second: str, finest: dict[str, Any]) -> None:
    policy = ours(f"on fc:\n by_index: {first}\n\n by_index: {second}\n")
    groups: dict[str, Any] = {"group_size": None} if "quant_groups" in finest else {}
    assert policy.settings("fc", None, "a.fc") == LayerSettings(**finest, **groups)
    assert policy.settings("gelu", None, "a.fc") == EXACT  # no rule of the tag


def test_rules_that_together_ask_for_rows_and_drop_are_refused() -> None:
    policy = ours("on fc:\n by_index: all\n drop: 0.5\n\n by_index: 3\n rows: 0.1\n")
    assert policy.settings("fc", 0, "a.fc").drop == 0.5
    with pytest.raises(PolicyError, match=r"drop 0.5 rows 0.1.*\n`rows` 0.1 does not go with drop 0.5"):
        policy.settings("fc", 3, "b.fc")


def test_modules_named_whole_keep_everything_inside_exact() -> None:
    policy = ours(
        "on fc:\n  by_index: all\n  level: 16\n\n"
        "on module:\n  by_name: blocks.1 head\n  enable: False\n\n  by_name: deep.*\n  store: exact\n\n"
        "  by_name: blocks.2\n  store: recompute\n  level: 4\n"
    )
    for name in ("blocks.1.mlp.fc", "head", "deep.er.fc"):
        assert policy.settings("fc", 0, name).exact
    for name in ("blocks.10.fc", "blocks.0.fc", "ahead", "blocks.2.fc", "deep"):
        assert policy.settings("fc", 0, name) == LayerSettings(level=16)
    assert policy.module_settings("blocks.2") == LayerSettings(store="recompute", level=4)
    assert policy.module_settings("blocks.0") is None
    named = [rule.names for rule in policy.module_rules()]
    assert named == [("blocks.1", "head"), ("deep.*",), ("blocks.2",)]
    assert Policy.parse(policy.dumps()) == policy


def test_later_module_rules_win_too() -> None:
    modules = "on module:\n  by_name: blocks.*\n  enable: False\n\n  by_name: blocks.1\n  enable: True\n"
    policy = ours("on fc:\n  by_index: all\n  level: 16\n\n" + modules)
    assert policy.settings("fc", 0, "blocks.0.fc").exact
    assert not policy.settings("fc", 0, "blocks.1.fc").exact


ASSIGNED = [
    ("fc", 0, "blocks.0.fc1", LayerSettings(level=16)),
    ("fc", 1, "blocks.0.fc2", LayerSettings(level=4, group_size=64)),
    ("fc", 2, "head", EXACT),
    ("fc", 3, "blocks.1.fc1", LayerSettings(level=16)),
    ("gelu", 0, "blocks.0.act", LayerSettings(level=2)),
    ("gelu", 1, "blocks.1.act", LayerSettings(level=2)),
    ("softmax", None, "blocks.0.attn.softmax.0", LayerSettings(group_size=None, quant_groups=3)),
    ("softmax", None, "blocks.1.attn.softmax.0", LayerSettings(level=8, store="derive")),
    ("loss", 0, "loss.cross_entropy.0", LayerSettings(store="exact")),
]


def test_assignments_are_what_the_policy_gives() -> None:
    policy = Policy.from_assignments(ASSIGNED, Header(model="m"))
    again = Policy.parse(policy.dumps())
    assert again == policy
    for tag, index, name, wanted in ASSIGNED:
        assert again.settings(tag, index, name) == (EXACT if wanted.exact else wanted)
        assert again.settings(tag, None, name) == (EXACT if wanted.exact else wanted)
    assert again.settings("fc", 9, "unheard.of") == EXACT


def test_assignments_make_a_short_file() -> None:
    assert Policy.from_assignments(ASSIGNED[:6]).dumps() == (
        "# mesa-tune policy 1\n"
        "on fc:\n"
        "    by_index: 0 3\n    by_name: blocks.0.fc1 blocks.1.fc1\n    enable: True\n    level: 16\n"
        "    group_size: 256\n\n"
        "    by_index: 1\n    by_name: blocks.0.fc2\n    enable: True\n    level: 4\n    group_size: 64\n\n"
        "    by_index: 2\n    by_name: head\n    enable: False\n\n"
        "on gelu:\n"
        "    by_index: all\n    enable: True\n    level: 2\n    group_size: 256\n"
    )


@pytest.mark.parametrize("name", ["a b", "a:b", "x#y", "p,q", "w[0]", "a*b", "c?d", ""], ids=repr)
def test_assignments_survive_names_that_lines_cannot_hold(name: str) -> None:
    assigned = [("fc", 0, name, LayerSettings(level=16)), ("fc", 1, "other", LayerSettings(level=4))]
    policy = Policy.parse(Policy.from_assignments(assigned).dumps())
    assert policy.settings("fc", 0, name).level == 16
    assert policy.settings("fc", 1, "other").level == 4


def test_equality_is_that_of_the_rules() -> None:
    one = ours(
        "on fc:\n  by_index: 5 3\n  by_name: b a\n  level: 16\n  enable: True\n"
        "on gelu:\n  by_index: all\n  level: 4\n"
    )
    same = Policy.parse(
        OURS + "# model other\non gelu:\n by_index: all\n level: 4 # four\n"
        "on fc:\n\tby_name: a,b\n\tby_index: 3,5\n\tenable: true\n\tlevel: 16"
    )
    assert one == same
    assert one.header != same.header
    assert one != ours("on fc:\n  by_index: 5\n  level: 16\n")
    assert one != "on fc"


def test_mesas_defaults_are_part_of_equality_where_there_are_rules() -> None:
    text = "on fc:\n  by_index: all\n  level: 16\n"
    assert Policy.parse(text) != ours(text)
    assert Policy.parse("") == ours("") == Policy()


def test_sections_of_several_tags_equal_sections_of_one() -> None:
    both = ours("on gelu relu:\n  by_index: all\n  level: 16\n\n  by_index: 1\n  by_tag: relu\n  level: 4\n")
    apart = ours(
        "on relu:\n  by_index: all\n  level: 16\n\n  by_index: 1\n  level: 4\n"
        "on gelu:\n  by_index: all\n  level: 16\n"
    )
    assert both == apart


def test_the_header_is_read_back() -> None:
    header = Header("deit tiny", "8f3c0a119b22ffee", "2.13.0+cpu", 128, "6.0 GB", "peak 5.71 GB, step 1.06x")
    policy = Policy(Policy.uniform(16).rules, header)
    assert policy.dumps().splitlines()[:4] == [
        "# mesa-tune policy 1",
        "# model deit tiny (layers 8f3c0a119b22ffee)  torch 2.13.0+cpu  batch 128  budget 6.0 GB",
        "# predicted: peak 5.71 GB, step 1.06x",
        "on fc:",
    ]
    assert Policy.parse(policy.dumps()).header == header


headers = st.builds(
    Header,
    st.one_of(st.none(), st.sampled_from(["deit_tiny", "my model", "a (b)", "torch x", "batch 3"])),
    st.one_of(st.none(), st.text("0123456789abcdef", min_size=4, max_size=16)),
    st.one_of(st.none(), st.just("2.13.0")),
    st.one_of(st.none(), st.integers(0, 10**6)),
    st.one_of(st.none(), st.just("40%"), st.just("6 GB")),
    st.one_of(st.none(), st.just("peak 1 GB")),
)


@given(headers)
def test_any_header_is_read_back(header: Header) -> None:
    again = Policy.parse(Policy(header=header).dumps()).header
    unnamed = header.model is None and header.fingerprint is not None
    assert again == (replace(header, model="unnamed") if unnamed else header)


def test_a_header_cannot_break_out_of_its_comment() -> None:
    header = Header(model="evil\non fc:\n  by_index: all", predicted="a\r\nb")
    policy = Policy.parse(Policy(header=header).dumps())
    assert policy.rules == ()
    assert policy.header == Header(model="evil on fc: by_index: all", predicted="a b")


def test_comments_further_down_are_no_header() -> None:
    policy = ours("on fc:\n  by_index: all\n  level: 16\n# model other (layers ffff)\n# predicted: rain\n")
    assert policy.header == Header()


def test_policies_can_be_copied_and_pickled() -> None:
    policy = ours("on fc:\n  by_index: 3\n  level: 16\n")
    assert copy.deepcopy(policy) == pickle.loads(pickle.dumps(policy)) == policy


ALL_RULES = (
    "on fc:\n  by_index: all\n  level: 16\n\n  by_index: 1 2\n  level: 4\n\n"
    "  by_name: blocks.*.fc2 head\n  group_size: 64\n"
    "on gelu:\n  by_name: blocks.1.*\n  level: 8\non module:\n  by_name: blocks.2\n  store: exact\n"
)


@pytest.mark.parametrize("text", [OURS + ALL_RULES, ALL_RULES, ""], ids=["ours", "mesa", "empty"])
def test_the_assignment_of_all_layers_is_that_of_each(text: str) -> None:
    policy = Policy.parse(text)
    names = [(tag, f"blocks.{n}.{name}") for n in range(3) for tag, name in (("fc", "fc1"), ("gelu", "gelu"))]
    names += [("fc", "blocks.1.fc2"), ("fc", "head")]
    layers = [(tag, index, name) for index, (tag, name) in enumerate(names)]
    expected = {name: policy.settings(tag, index, name) for tag, index, name in layers}
    assert policy.assignment(layers) == expected
    assert len(set(expected.values())) > 2 or not text
