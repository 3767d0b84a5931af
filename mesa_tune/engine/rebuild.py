"""`Rebuild`: how to rematerialize a function's output from what the function saves (`store: derive`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


class Ingredients(NamedTuple):
    """The tensors from which a function's output is rematerialized, decoded. See `Rebuild`."""

    static: tuple[Any, ...]
    lossy: Sequence[Tensor]
    exact: Sequence[Tensor]
    references: Sequence[Tensor | None]
    inputs: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Rebuild:
    """How to rematerialize a function's output from what the function saves (`store: derive`).

    `run(ingredients)` returns the output. `saved`: for each lossy tensor of the function, the position of the
    input that it is (`saved_is_input`), or whose shape and dtype it has. `exact`: positions in
    `Result.exact`. `references`: positions of inputs that exist anyway (parameters). `inputs`: positions of
    inputs that are rematerialized first. `when(static, needs)`: whether a call saves all that this takes.
    """

    run: Callable[[Ingredients], Tensor]
    saved: tuple[int, ...] = (0,)
    saved_is_input: bool = False
    exact: tuple[int, ...] = ()
    references: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    when: Callable[[tuple[Any, ...], tuple[bool, ...]], bool] = lambda static, needs: True
