"""ActNN's data loader: torch's, with items `(indices of the samples, data)`."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import data
from torch.utils.data import default_collate


class _Numbered(data.Dataset[tuple[int, Any]]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)


class _Collate:
    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, pairs: Sequence[tuple[int, Any]]) -> tuple[list[int], Any]:
        return [index for index, _ in pairs], self.collate([sample for _, sample in pairs])


class DataLoader(data.DataLoader[Any]):
    """`torch.utils.data.DataLoader` with the same arguments and order; an item is `(indices, data)`.

    `indices` lists the samples' indices in the data set, for `QScheme.batch`.

    Raises:
        ValueError: an iterable data set, whose samples have no index, or `batch_size=None`.
    """

    def __init__(
        self,
        dataset: data.Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(dataset, data.IterableDataset) or (batch_size is None and batch_sampler is None):
            raise ValueError(
                "actnn.DataLoader yields indices, so it needs a data set with indices and a batch size: "
                "pass a map-style data set and a batch size, or use torch's loader without `use_gradient`"
            )
        super().__init__(
            _Numbered(dataset),
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=_Collate(collate_fn or default_collate),
            **kwargs,
        )
