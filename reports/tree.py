"""Saved bytes by the tree of modules, in which siblings that are alike are one node.

What is hard: blocks that are alike save alike, but a policy may store some of them in another way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from mesa_tune.units import format_bytes

Bytes = tuple[int, ...]
"""Saved bytes before a policy and, if there is one, after."""


@dataclass
class Node:
    """A module, or a layer without children, with what it and all below it save.

    `count`: siblings that are alike, of which this is the first; `last`: the name of their last. Their bytes
    are those of one.
    """

    name: str
    bytes: Bytes
    children: list[Node] = field(default_factory=list)
    count: int = 1
    last: str = ""

    @property
    def title(self) -> str:
        """The name; of alike siblings `0 … 11`."""
        return f"{self.name} … {self.last}" if self.count > 1 else self.name

    @property
    def total(self) -> Bytes:
        """The bytes of all siblings that are alike."""
        return tuple(self.count * each for each in self.bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: of alike siblings the first, and how many there are."""
        names = ("before", "after")[: len(self.bytes)]
        children = [child.to_dict() for child in self.children]
        return {
            "name": self.name,
            "count": self.count,
            **dict(zip(names, self.bytes, strict=True)),
            "children": children,
        }

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for siblings that differ in name alone."""
        return self.bytes, tuple((child.name, child.count, child.shape) for child in self.children)


def module_tree(layers: pd.DataFrame, title: str) -> Node:
    """Return the tree of a `layers_frame`, named `title`: of modules that save anything."""
    columns = [name for name in ("before", "after") if name in layers]
    rows = zip(*(layers[name] for name in ("name", "module", "tag", *columns)), strict=True)
    found = [
        (_parts(name, module, tag), tuple(int(each) for each in saved))
        for name, module, tag, *saved in rows
        if any(saved)
    ]
    return _node(title, found)


def _parts(name: str, module: str, tag: str) -> list[str]:
    """Return the modules around a layer, and the name of its function, as `gelu.0`, if it is one's call."""
    path = name if tag == "module" else module
    call = name.removeprefix(path).removeprefix(".")
    return [*filter(None, path.split(".")), *([call] if call else [])]


def _node(name: str, layers: Sequence[tuple[list[str], Bytes]]) -> Node:
    groups: dict[str, list[tuple[list[str], Bytes]]] = {}
    for parts, saved in layers:
        if parts:
            groups.setdefault(parts[0], []).append((parts[1:], saved))
    total = tuple(sum(column) for column in zip(*(saved for _, saved in layers), strict=True))
    return _shortened(Node(name, total, _folded([_node(*group) for group in groups.items()])))


def _shortened(node: Node) -> Node:
    """Return a module with one child as that child: `encoder.layer`."""
    if len(node.children) != 1 or node.children[0].count > 1 or node.children[0].bytes != node.bytes:
        return node
    child = node.children[0]
    return Node(f"{node.name}.{child.name}", child.bytes, child.children)


def _folded(nodes: Sequence[Node]) -> list[Node]:
    """Return siblings, of which those that follow each other and are alike are one node."""
    folded: list[Node] = []
    for node in nodes:
        if folded and node.children and folded[-1].shape == node.shape:
            folded[-1].count += 1
            folded[-1].last = node.name
        else:
            folded.append(node)
    return folded


def tree_lines(root: Node, least: float = 0.01) -> Iterator[list[str]]:
    """Yield the cells of each node, depth first: its name, indented, and its bytes; small ones are left out.

    `least`: share of the root's bytes below which siblings are one line.
    """
    yield from _lines(root, 0, root.bytes[0] * least)


def _lines(node: Node, depth: int, least: float) -> Iterator[list[str]]:
    each = f" ({node.count} × {format_bytes(node.bytes[0])})" if node.count > 1 else ""
    yield ["  " * depth + node.title + each, *(format_bytes(size) for size in node.total)]
    large = [child for child in node.children if child.total[0] >= least]
    for child in sorted(large, key=lambda child: -child.total[0]):
        yield from _lines(child, depth + 1, least / node.count)
    rest = [child.total for child in node.children if child.total[0] < least]
    if rest and depth + len(large) and any(sum(column) for column in zip(*rest, strict=True)):
        sums = [format_bytes(sum(column)) for column in zip(*rest, strict=True)]
        yield [f"{'  ' * (depth + 1)}{len(rest)} smaller", *sums]


def boxes(root: Node) -> pd.DataFrame:
    """Return the boxes of an icicle: `state, depth, start, bytes, name, count`.

    `state`: `plain`, and `policy` if there is one. A box lies below that of its parent, and begins where
    the box before it ends.
    """
    states = ("plain", "policy")[: len(root.bytes)]
    rows = [row for number, state in enumerate(states) for row in _boxes(root, number, state, 0, 0, 1)]
    return pd.DataFrame(rows, columns=["state", "depth", "start", "bytes", "name", "count"])


def _boxes(
    node: Node, number: int, state: str, depth: int, start: int, times: int
) -> Iterator[tuple[object, ...]]:
    """Yield the box of a node that stands for `times` alike ones, and those below it."""
    times *= node.count
    yield state, depth, start, times * node.bytes[number], node.title, node.count
    for child in node.children:
        yield from _boxes(child, number, state, depth + 1, start, times)
        start += times * child.total[number]
