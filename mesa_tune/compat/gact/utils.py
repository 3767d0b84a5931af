"""GACT's helpers: memory, samples of a tensor, and its recorder of results."""

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
    """Bytes of a tensor, or of several together, each by its elements; a plain number has 4."""
    given = [tensors] if isinstance(tensors, (Tensor, int)) else tensors
    return sum(4 if isinstance(each, int) else each.numel() * each.element_size() for each in given)


def uniform_sample(input: Tensor, sample_cnt: int, add_dataptr: bool = True) -> list[float | int]:
    """The address of `input` if `add_dataptr`, and `sample_cnt` elements (at most all) at equal distances."""
    count = min(input.numel(), sample_cnt)
    places = torch.arange(count, device=input.device) * (input.numel() // max(count, 1))
    return _sampled(input, places, add_dataptr)


uniform_sample_ref = uniform_sample


def random_sample(input: Tensor, sample_cnt: int, add_dataptr: bool = True) -> list[float | int]:
    """The address of `input` if `add_dataptr`, and `sample_cnt` elements at random but fixed places."""
    generator = torch.Generator().manual_seed(input.dim())
    places = torch.randint(0, input.numel(), (sample_cnt,), generator=generator).to(input.device)
    return _sampled(input, places, add_dataptr)


def _sampled(input: Tensor, places: Tensor, add_dataptr: bool) -> list[float | int]:
    elements: list[float | int] = input.detach().flatten()[places].tolist()
    return [input.data_ptr(), *elements] if add_dataptr else elements
