"""Make the rows of a profile: which layers save which tensors, share them, and in how many bytes.

What is hard: a layer saves other tensors in the plain step than in the compressed one, and shares them with
other layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from mesa_tune.measure.memory.step_trace import CodedTrace, PlainTrace, StepTrace
from mesa_tune.measure.memory.traced_steps import UNATTRIBUTED, unattributed_bytes
from mesa_tune.policy.settings import MIN_ELEMENTS, LayerSettings
from mesa_tune.profiles.entries import UNLISTED, LayerEntry
from mesa_tune.profiles.timeline.packed_sizes import settings_bytes, within


class Rows:
    """The layers of a step, traced plain and packed.

    `tags`: tag and index of each layer; `modules`: names of the model's.
    """

    def __init__(
        self, plain: StepTrace, packed: StepTrace, tags: dict[str, tuple[str, int]], modules: Sequence[str]
    ) -> None:
        self.plain, self.packed = plain, packed
        self.tags = tags
        self.modules = modules
        self.unattributed = unattributed_bytes(plain)
        self.hooked = tuple(name for name, (tag, _) in tags.items() if tag == "other")

    def entries(self) -> Iterator[LayerEntry]:
        """Yield a row without options for each layer that saves something, in the order of the calls."""
        plain, coded = self.plain, self.packed.coded
        order: dict[str, None] = dict.fromkeys(slot.layer for slot in self.packed.slots if slot.layer)
        order.update(dict.fromkeys(self.tags))
        order.update(dict.fromkeys(name for item in plain.plain.values() for name in item.layers))
        for name in order:
            saved = [(number, item) for number, item in sorted(plain.plain.items()) if name in item.layers]
            stored = [item for item in coded.values() if name in item.layers]
            if not saved and not stored:
                continue
            largest = max(saved, key=lambda pair: plain.lifetimes[pair[0]].bytes, default=(0, None))[1]
            tag, index = self.tags.get(name, ("other", UNLISTED))
            yield LayerEntry(
                name=name,
                tag=tag,
                index=index,
                module=_module(name, self.modules),
                shape=largest.shape if largest else stored[0].shape,
                dtype=largest.dtype if largest else "float32",
                bytes=_most(plain, {number: plain.lifetimes[number].bytes for number, _ in saved}),
                own_bytes=sum(
                    plain.lifetimes[number].bytes
                    for number, item in saved
                    if item.layers[0] == name and plain.is_counted(number)
                ),
                shared_with=tuple(self._sharers(name)),
                options=(),
            )
        if self.unattributed:
            size = self.unattributed
            row = (UNATTRIBUTED, "other", UNLISTED, "", (size,), "uint8", size, size, (), ())
            yield LayerEntry(*row)

    def _sharers(self, name: str) -> list[str]:
        items: list[PlainTrace | CodedTrace] = [*self.plain.plain.values(), *self.packed.coded.values()]
        together = dict.fromkeys(layer for item in items if name in item.layers for layer in item.layers)
        return [layer for layer in together if layer != name]

    def groups(self) -> list[tuple[str, ...]]:
        """Return the groups of two or more layers that share a packed tensor, directly or through others.

        Layers that share a tensor in the plain step alone (attention's output and the projection's input) may
        have different settings: if both compress, they share nothing.
        """
        root: dict[str, str] = {}

        def find(name: str) -> str:
            while root.setdefault(name, name) != name:
                name = root[name]
            return name

        for item in self.packed.coded.values():
            for layer in item.layers[1:]:
                root[find(layer)] = find(item.layers[0])
        groups: dict[str, list[str]] = {}
        for name in root:
            groups.setdefault(find(name), []).append(name)
        return [tuple(group) for group in groups.values() if len(group) > 1]

    def bytes(self, name: str, option: LayerSettings) -> int:
        """Return the bytes that the layer saves under `option`."""
        packed = self.packed
        sizes = {
            number: packed.lifetimes[number].bytes for number, layer in packed.side.items() if layer == name
        }
        for number, item in packed.coded.items():
            if name in item.layers:
                elements = prod(item.shape)
                small = elements <= MIN_ELEMENTS
                samples = item.shape[0] if len(item.shape) > 1 else 1
                own = within(option, packed.rows.get(name, 0))
                width = item.width if name in packed.samplers else 0
                packed_bytes = settings_bytes(elements, own, item.itemsize, samples, width)
                sizes[number] = elements * item.itemsize if small else packed_bytes
        return _most(packed, sizes)

    def may_leave_out_rows(self, group: Sequence[str]) -> bool:
        """Return whether all of these layers may leave out rows."""
        return self.packed.samplers.issuperset(group)

    def may_have_levels(self, group: Sequence[str]) -> bool:
        """Return whether all of these layers may store fixed levels."""
        return self.packed.valued.issuperset(group)

    def can_be_stored(self, group: Sequence[str]) -> bool:
        """Return whether anything that these layers save can be compressed."""
        coded = any(set(item.layers) & set(group) for item in self.packed.coded.values())
        return coded or any(layer in group for layer in self.packed.side.values())


def _most(trace: StepTrace, sizes: Mapping[int, int]) -> int:
    """Return the sum of these sizes of storages; of a step with several forwards, the most of one of them."""
    forwards = range(len(trace.forwards))
    sums = [sum(sizes[number] for number in sizes if trace.belongs_to(number, index)) for index in forwards]
    return max(sums, default=0)


def _module(name: str, modules: Sequence[str]) -> str:
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in modules), "")
