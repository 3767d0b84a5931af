"""y = softmax(s q kᵀ + m) v. Saved: q, k and v; exact: the mask m, and what dropout let through, in a bit an
element where PyTorch makes the softmax whole (CPU, traced code), else by the random state.

Backward makes the softmax again of the decoded q and k (Rule 7): with a saved log-sum-exp, an error of q
would appear exponentiated in weights that no longer sum to one. On the CPU it does so a head at a time
(`by_heads`), elsewhere in traced code, which cannot differentiate inside a backward, by `traced`, and
elsewhere in eager code it runs the forward again; the random state of dropout is put back then, and left as
it was found. A mask that was made by repeating two smaller ones in a sum is saved as those
(`engine/sums.py`).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune import ops
from mesa_tune.engine import sums
from mesa_tune.engine.call import Call, autocast_dtype
from mesa_tune.engine.formula import Formula, Grads, Needs, Result, Route, Routes, Saved, Static
from mesa_tune.engine.tensors import cast
from mesa_tune.formulas.attention import by_heads
from mesa_tune.formulas.attention.by_heads import Scores
from mesa_tune.formulas.attention.traced import traced_gradients, written_out
from mesa_tune.ops.devices import on_cpu


def forward(
    static: Static, needs: Needs, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *summands: Tensor
) -> Result:
    *_, dtype = static
    given = (q, k, v) if dtype is None else (cast(q, dtype), cast(k, dtype), cast(v, dtype))
    added = _cast_mask(mask, dtype, needs[3])
    state = bits = None
    if static[0] > 0 and _saves_bits(q):
        y, bits = _dropped(static, *given, added)
    else:
        state = _random_state(q.device) if static[0] > 0 else None
        y = _attend(static, *given, added)
    return Result(y, (q, k, v), (None if summands else mask, state, bits, *summands))


def _saves_bits(q: Tensor) -> bool:
    """Whether P is there as a whole in PyTorch's own forward with dropout, or no random state can be read."""
    return on_cpu(q) or torch.compiler.is_compiling()


def _dropped(static: Static, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output as PyTorch makes it where no fused kernel has dropout, and what dropout let through."""
    dropout, causal, scale, grouped, _ = static
    bias = None if mask is None else by_heads.as_bias(mask, q.dtype)
    with torch.autocast(q.device.type, enabled=False):  # what is inside would be cast once more
        y, p = torch.ops.aten._scaled_dot_product_attention_math(
            q, k, v, bias, dropout, causal, None, scale=scale, enable_gqa=grouped
        )
    return y, ops.pack_bits(p != 0)


def backward(saved: Saved, grad: Tensor) -> Grads:
    """Some samples decoded at a time, if there are several; else all of them."""
    static, needs, lossy, exact = saved
    *_, dtype = static
    shapes = [tensor.shape for tensor in lossy]
    scores = _scores(static, shapes[0][-1], exact)
    by_head = not needs[3] and by_heads.serves(shapes, grad)
    uncast = dtype is None or all(tensor.dtype == dtype for tensor in lossy)
    traced = torch.compiler.is_compiling()
    samples = by_heads.packed(lossy) if by_head and uncast and shapes[0][0] > 1 and not traced else None
    if samples is not None:
        return _all(needs, by_heads.gradients(scores, needs, shapes, samples, grad))
    state = exact[1]
    q, k, v = (tensor.whole(dtype) for tensor in lossy)
    mask = scores.mask
    if by_head:
        return _all(needs, by_heads.gradients(scores, needs, shapes, by_heads.whole(q, k, v), grad))
    if traced:
        mask = _cast_mask(mask, dtype, False)
        return traced_gradients(scores._replace(mask=mask), needs, q, k, v, grad)
    if scores.bits is not None:
        return written_out(scores, needs, q, k, v, grad)
    inputs = [q, k, v, *(() if mask is None else (_cast_mask(mask, dtype, needs[3]),))]
    wanted = needs[: len(inputs)]
    with _replaying(q.device, state):
        again = [tensor.detach().requires_grad_(want) for tensor, want in zip(inputs, wanted, strict=True)]
        y = _attend(static, again[0], again[1], again[2], again[3] if len(again) > 3 else None)
        grads = iter(torch.autograd.grad(y, [tensor for tensor in again if tensor.requires_grad], grad))
    # What the mask is the sum of has its gradient by the mask's.
    return tuple(next(grads) if want else None for want in needs)


def _scores(static: Static, width: int, exact: Sequence[Any]) -> Scores:
    dropout, causal, scale, *_ = static
    mask, _, bits, *summands = exact
    if summands:
        mask = summands[0] + summands[1]
    return Scores(1 / math.sqrt(width) if scale is None else scale, causal, mask, dropout, bits)


def _all(needs: Needs, grads: Grads) -> Grads:
    """Return the gradients of queries, keys and values, and none of a mask and its parts."""
    return (*grads, *(None for _ in needs[len(grads) :]))


def _attend(static: Static, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    dropout, causal, scale, grouped, _ = static
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)


def _cast_mask(mask: Tensor | None, dtype: torch.dtype | None, wanted: bool) -> Tensor | None:
    if mask is None or dtype is None or not mask.is_floating_point():
        return mask
    # PyTorch chooses its kernel by whether the mask wants a gradient; a cast in a Function would hide that.
    return mask.to(dtype).detach().requires_grad_(wanted)


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _replaying(device: torch.device, state: Tensor | None) -> Iterator[None]:
    """Gradients on, casts, modes and hooks off; the random state of the forward, and back at the end."""
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        if state is not None:
            cuda = device.type == "cuda"
            stack.enter_context(torch.random.fork_rng(devices=[device] if cuda else []))
            torch.cuda.set_rng_state(state, device) if cuda else torch.set_rng_state(state)
        yield


ATTENTION = Formula(
    "attention",
    forward,
    backward,
    "queries, keys and values; exact: the mask, and dropout's bits, or random state on CUDA",
    views=True,
)


def scaled_dot_product_attention(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Route of `F.scaled_dot_product_attention`: causal, masked, grouped heads, dropout, any dimensions."""
    if not call.gains(query, key, value):
        return call.plain()
    if dropout_p > 0 and query.device.type not in ("cpu", "cuda"):
        return call.refuse(f"dropout inside attention cannot be repeated on {query.device.type}")
    static = (dropout_p, is_causal, scale, enable_gqa, autocast_dtype(query))
    summed = None if attn_mask is None else call.look_up(sums.parts, attn_mask)
    return call.apply(ATTENTION, static, query, key, value, attn_mask, *(summed or ()))


ROUTES: Routes = {
    F.scaled_dot_product_attention: Route(
        "scaled_dot_product_attention", "attention", scaled_dot_product_attention
    )
}
