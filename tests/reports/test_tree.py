"""What modules save, as a tree in which alike siblings are one node."""

from __future__ import annotations

import pandas as pd

from mesa_tune.reports.tree import Node, boxes, module_tree, tree_lines


def frame(calls: tuple[str, ...] = (), /, **saved: int | tuple[int, int]) -> pd.DataFrame:
    """Layers with bytes before, and after if there are pairs; `__` in a name is a dot.

    `calls`: names of functions; other layers are modules.
    """
    rows = []
    for name, value in saved.items():
        path = name.replace("__", ".")
        call = next((each for each in ("gelu.0", *calls) if path.endswith(each)), "")
        before, *after = value if isinstance(value, tuple) else (value,)
        module = path.removesuffix(call).removesuffix(".")
        rows.append(
            {
                "name": path,
                "module": module,
                "tag": "",
                "before": before,
                **dict(zip(["after"], after, strict=False)),
            }
        )
    return pd.DataFrame(rows)


BLOCKS = {
    f"blocks__{block}__{layer}": size
    for block in range(3)
    for layer, size in {"fc1": 10_000, "gelu__0": 30_000, "fc2": 20_000}.items()
}


def names(node: Node) -> list[str]:
    """Titles of the children."""
    return [child.title for child in node.children]


def test_siblings_that_are_alike_are_one_node() -> None:
    tree = module_tree(frame(stem=5_000, **BLOCKS, head=7_000), "Net")
    assert tree.bytes == (192_000,)
    assert names(tree) == ["stem", "blocks", "head"]
    (block,) = tree.children[1].children
    assert (block.title, block.count, block.bytes, block.total) == ("0 … 2", 3, (60_000,), (180_000,))
    assert names(block) == ["fc1", "gelu.0", "fc2"]


def test_siblings_that_differ_are_told_apart() -> None:
    tree = module_tree(frame(**{**BLOCKS, "blocks__1__fc2": 20_001}), "Net")
    assert tree.name == "Net.blocks"
    assert names(tree) == ["0", "1", "2"]


def test_after_a_policy_alike_means_alike_in_both() -> None:
    saved = {name: (size, size // 4) for name, size in BLOCKS.items()}
    tree = module_tree(frame(**saved), "Net")
    assert [child.count for child in tree.children] == [3]
    assert tree.bytes == (180_000, 45_000)
    assert tree.to_dict()["children"][0] | {"children": []} == {
        "name": "0",
        "count": 3,
        "before": 60_000,
        "after": 15_000,
        "children": [],
    }
    saved["blocks__2__fc1"] = (10_000, 10_000)
    assert [child.count for child in module_tree(frame(**saved), "Net").children] == [2, 1]


def test_sums_of_the_lines_are_those_of_the_step() -> None:
    tree = module_tree(frame(stem=5_000, **BLOCKS, head=700), "Net")
    lines = list(tree_lines(tree, least=0.02))
    assert lines == [
        ["Net", "186 kB"],
        ["  blocks", "180 kB"],
        ["    0 … 2 (3 × 60.0 kB)", "180 kB"],
        ["      gelu.0", "30.0 kB"],
        ["      fc2", "20.0 kB"],
        ["      fc1", "10.0 kB"],
        ["  stem", "5.00 kB"],
        ["  1 smaller", "700 B"],
    ]


def test_calls_of_functions_are_no_modules() -> None:
    tree = module_tree(frame(("relu.1",), net__0=10, net__1=20, gelu__0=30, relu__1=40), "Net")
    assert names(tree) == ["net", "gelu.0", "relu.1"]
    assert names(tree.children[0]) == ["0", "1"]


def test_inputs_of_modules_that_run_again_are_in_them() -> None:
    again = pd.DataFrame([{"name": "blocks.0", "module": "", "tag": "module", "before": 0, "after": 70}])
    tree = module_tree(pd.concat([frame(blocks__0__fc1=(90, 0)), again]), "Net")
    assert tree.bytes == (90, 70)


def test_boxes_lie_below_their_parents_on_one_scale() -> None:
    saved = {name: (size, size // 2) for name, size in BLOCKS.items()}
    found = boxes(module_tree(frame(stem=(40, 40), **saved), "Net"))
    assert set(found["state"]) == {"plain", "policy"}
    for _, state in found.groupby("state"):
        whole = state[state["depth"] == 0].iloc[0]
        for _, row in state.groupby("depth"):
            ends = row["start"] + row["bytes"]
            assert (row["start"].to_numpy()[1:] >= ends.to_numpy()[:-1]).all()
            assert ends.max() <= whole["bytes"]
    block = found[(found["state"] == "plain") & (found["name"] == "0 … 2")].iloc[0]
    assert (block["start"], block["bytes"], block["count"]) == (40, 180_000, 3)
