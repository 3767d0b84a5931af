"""GACT's helpers: memory in use, samples of a tensor's elements, and the recorder of results."""

from collections.abc import Iterable

import torch
from torch import Tensor

from mesa_tune.compat.actnn.utils import empty_cache, get_memory_usage
from mesa_tune.compat.recorder import GlobalExpRecorder, exp_recorder

__all__ = [
    "GlobalExpRecorder",
    "compute_tensor_bytes",
    "empty_cache",
    "exp_recorder",
    "get_memory_usage",
    "random_sample",
    "uniform_sample",
    "uniform_sample_ref",
]


def compute_tensor_bytes(tensors: Tensor | int | Iterable[Tensor | int]) -> int:
    """Return the bytes of all elements of one tensor or several; a plain number counts 4 bytes."""
    values = [tensors] if isinstance(tensors, (Tensor, int)) else tensors
    return sum(4 if isinstance(value, int) else value.numel() * value.element_size() for value in values)


def uniform_sample(input: Tensor, sample_cnt: int, add_dataptr: bool = True) -> list[float | int]:
    """Return `sample_cnt` elements (at most all) at equal distances, after the address if `add_dataptr`."""
    count = min(input.numel(), sample_cnt)
    indices = torch.arange(count, device=input.device) * (input.numel() // max(count, 1))
    return _sampled(input, indices, add_dataptr)


uniform_sample_ref = uniform_sample


def random_sample(input: Tensor, sample_cnt: int, add_dataptr: bool = True) -> list[float | int]:
    """Return `sample_cnt` elements at random but fixed indices, after the address if `add_dataptr`."""
    generator = torch.Generator().manual_seed(input.dim())
    indices = torch.randint(0, input.numel(), (sample_cnt,), generator=generator).to(input.device)
    return _sampled(input, indices, add_dataptr)


def _sampled(input: Tensor, indices: Tensor, add_dataptr: bool) -> list[float | int]:
    elements: list[float | int] = input.detach().flatten()[indices].tolist()
    return [input.data_ptr(), *elements] if add_dataptr else elements
