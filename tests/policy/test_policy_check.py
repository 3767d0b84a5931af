"""Policy.check: a policy names only layers that are there, and is for this model."""

import pytest

from mesa_tune.errors import PolicyError
from mesa_tune.policy import Policy
from mesa_tune.policy.policy import Header
from mesa_tune.policy.settings import LayerSettings

OURS = "# mesa-tune policy 1\n"

LAYERS: list[tuple[str, int | None, str]] = [
    *(("fc", 0, "blocks.0.mlp.fc1"), ("fc", 1, "blocks.0.mlp.fc2"), ("fc", 2, "head")),
    *(("gelu", 0, "blocks.0.mlp.act"), ("softmax", 0, "blocks.0.attn.softmax.0")),
]
MODULES = ["", "blocks", "blocks.0", "blocks.0.mlp", "blocks.0.mlp.fc1", "blocks.0.attn", "head"]
LOSS: list[tuple[str, int | None, str]] = [("loss", 0, "loss.cross_entropy.0")]


def rule(tag: str, condition: str) -> Policy:
    setting = "enable: False" if tag == "module" else "level: 16"
    return Policy.parse(f"{OURS}on {tag}:\n    {condition}\n    {setting}\n", source="p.txt")


@pytest.mark.parametrize(
    "policy",
    [
        *(rule("fc", condition) for condition in ("by_index: 0 1 2", "by_index: all", "by_name: nothing.*")),
        *(rule("fc", "by_name: head blocks.0.mlp.fc1"), rule("conv", "by_index: all")),
        *(rule("fc gelu", "by_index: 2"), rule("fc gelu", "by_name: head")),
        *(rule("softmax", "by_name: blocks.0.attn.softmax.0"), rule("module", "by_name: blocks.0")),
        *(rule("loss", "by_name: loss.cross_entropy.0"), rule("loss", "by_index: 0")),
        *(Policy.uniform(16), Policy()),
        rule("softmax", "by_index: 40\n    by_name: blocks.0.attn.softmax.0"),  # the index is for Mesa only
    ],
    ids=lambda policy: policy.dumps()[21:60].replace("\n", " "),
)
def test_a_policy_that_fits_passes(policy: Policy) -> None:
    assert policy.check(LAYERS, modules=MODULES) == ()
    assert policy.check([*LAYERS, *LOSS]) == ()


@pytest.mark.parametrize(
    ("policy", "what", "remedy"),
    [
        (rule("fc", "by_index: 1 3"), "no fc layer has index 3", "in this model are 0 to 2"),
        (rule("gelu", "by_index: 1"), "no gelu layer has index 1", "are 0 only"),
        (rule("conv", "by_index: 0"), "no conv layer has index 0", "has no conv layers"),
        (rule("gelu relu", "by_index: 4"), "no gelu or relu layer has index 4", "0 only"),
        (rule("fc", "by_name: blocks.0.mlp.fc3"), "no fc layer 'blocks.0.mlp.fc3'", "'blocks.0.mlp.fc"),
        (rule("gelu", "by_name: head"), "'head' is no gelu layer", "move it to `on fc:`"),
        (rule("fc", "by_index: 0\n    by_name: tail"), "no fc layer 'tail'", "remove it"),
        (rule("module", "by_name: blocks.1"), "no module 'blocks.1'", "did you mean 'blocks.0'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_layer_has_is_refused_with_line_text_and_remedy(
    policy: Policy, what: str, remedy: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        policy.check(LAYERS)
    first, second = str(caught.value).splitlines()
    line = 4 if "tail" in what else 3
    assert first.startswith(f'p.txt:{line}: {what} in "    by_')
    assert remedy in second
    assert policy.check(LAYERS, force=True) == (str(caught.value),)
    assert policy.unmatched(LAYERS) == (str(caught.value),)


def test_a_policy_made_in_python_is_refused_with_its_source() -> None:
    gone, head = ("fc", 7, "gone", LayerSettings(level=4)), ("fc", 0, "head", LayerSettings(level=16))
    policy = Policy.from_assignments([gone, head])
    with pytest.raises(PolicyError, match=r"^plan\.json: no fc layer 'gone'\n"):
        policy.check(LAYERS, source="plan.json")


CALLS = {  # by name in a module, of the root, and beside a module
    "by_index: 11": "softmax",
    "by_name: blocks.0.attn.matmul.1": "matmul",
    "by_name: cross_entropy.0": "loss",
    "by_name: head blocks.0.linear.0": "fc",
}


@pytest.mark.parametrize("condition", CALLS)
def test_while_calls_are_unknown_they_pass(condition: str) -> None:
    policy = rule(CALLS[condition], condition)
    assert policy.check(LAYERS[:4], complete=False, modules=MODULES) == ()
    assert len(policy.unmatched(LAYERS)) == 1


def test_while_calls_are_unknown_foreign_modules_are_refused() -> None:
    for name in ("blocks.7.attn.softmax.0", "blocks.0.mlp.fc9", "tail"):
        with pytest.raises(PolicyError, match=name):
            rule("softmax", f"by_name: {name}").check(LAYERS[:4], complete=False, modules=MODULES)


def test_the_loss_is_judged_only_where_its_layers_are_known() -> None:
    policy = rule("loss", "by_name: loss.nll_loss.0")
    assert policy.check(LAYERS) == ()
    with pytest.raises(PolicyError, match=r"did you mean 'loss\.cross_entropy\.0'"):
        policy.check([*LAYERS, *LOSS])


def test_the_model_is_not_judged_by_the_layers_of_a_loss() -> None:
    policy = Policy.parse("on fc:\n by_index: 9\n level: 8\n\n by_name: blocks.3.fc\n level: 4\n")
    assert policy.check(LOSS, modules=["loss"]) == ()


def test_a_model_that_is_one_layer_is_judged() -> None:
    with pytest.raises(PolicyError, match="no fc layer has index 1"):
        rule("fc", "by_index: 1").check([("fc", 0, "")], modules=[""])


HEADED = Policy.parse(
    f"{OURS}# model deit_tiny (layers 8f3c0a…)  torch 2.13\non fc:\n  by_index: 0\n  level: 4\n"
)


def test_another_models_policy_is_refused_with_its_line() -> None:
    with pytest.raises(PolicyError) as caught:
        HEADED.check(LAYERS, fingerprint="1234abcd")
    first, second = str(caught.value).splitlines()
    assert first.startswith("policy.txt:2: made for another model (this model's layers are 1234abcd)")
    assert "model deit_tiny (layers 8f3c0a…)" in first
    assert "with force=True" in second
    assert HEADED.check(LAYERS, fingerprint="1234abcd", force=True) == (str(caught.value),)


def test_the_models_own_policy_passes_by_the_beginning_of_its_fingerprint() -> None:
    assert HEADED.check(LAYERS, fingerprint="8f3c0a11d2") == ()
    assert HEADED.check(LAYERS) == ()
    assert Policy(header=Header(model="m")).check(LAYERS, fingerprint="1234") == ()
