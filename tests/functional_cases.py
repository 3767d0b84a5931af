"""One case a way of calling a routed torch function: how to make its arguments, and what to know of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune.codecs import Spec
from mesa_tune.functional.call import Call
from mesa_tune.functional.table import ROUTES

EIGHT = Spec("quantize", 8, 256, 256, 0, True, 0)
RAW = EIGHT._replace(levels=0)
KEY = torch.tensor([12345])


class Case(NamedTuple):
    """`function(*make(dtype), **kwargs)`; tensors that want gradients require them."""

    function: Callable[..., Any]
    make: Callable[[torch.dtype], list[Any]]
    kwargs: dict[str, Any] = {}  # noqa: RUF012


def leaf(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """A normal tensor that wants a gradient."""
    return (torch.randn(shape, dtype=torch.float64) * scale).to(dtype).requires_grad_()


def served(function: Callable[..., Any], spec: Spec, *args: Any, **kwargs: Any) -> Any:
    """The call by our function, with `spec`, nothing being a parameter or batch."""
    call = Call("layer", spec, lambda device: KEY, lambda tensor: False, lambda: function(*args, **kwargs))
    return ROUTES[function].serve(call, *args, **kwargs)


def _tensors(*shapes: tuple[int, ...]) -> Callable[[torch.dtype], list[Any]]:
    return lambda dtype: [leaf(*shape, dtype=dtype) for shape in shapes]


def _conv(x: tuple[int, ...], w: tuple[int, ...], *rest: Any, bias: bool = True) -> Callable[..., list[Any]]:
    def make(dtype: torch.dtype) -> list[Any]:
        return [
            leaf(*x, dtype=dtype),
            leaf(*w, dtype=dtype, scale=0.3),
            leaf(w[0], dtype=dtype) if bias else None,
            *rest,
        ]

    return make


def _channels_last(dtype: torch.dtype) -> list[Any]:
    x = leaf(3, 4, 8, 6, dtype=dtype).detach().contiguous(memory_format=torch.channels_last)
    return [x.requires_grad_(), leaf(8, 4, 3, 3, dtype=dtype), None, 1, 1]


def _norm(dtype: torch.dtype) -> list[Any]:
    return [leaf(6, 5, 32, dtype=dtype, scale=3), (32,), leaf(32, dtype=dtype), leaf(32, dtype=dtype)]


def _batch(
    *shape: int, training: bool, affine: bool = True, running: bool = True
) -> Callable[..., list[Any]]:
    def make(dtype: torch.dtype) -> list[Any]:
        c = shape[1]
        statistics = [torch.randn(c).to(dtype), (torch.rand(c) + 0.5).to(dtype)] if running else [None, None]
        weights = [leaf(c, dtype=dtype), leaf(c, dtype=dtype)] if affine else [None, None]
        return [leaf(*shape, dtype=dtype, scale=2), *statistics, *weights, training, 0.3]

    return make


def _batch_last(dtype: torch.dtype) -> list[Any]:
    args = _batch(4, 6, 5, 5, training=True)(dtype)
    args[0] = args[0].detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    return args


def _attention(
    lengths: tuple[int, int] = (12, 12), mask: str = "", heads: int = 2
) -> Callable[..., list[Any]]:
    def make(dtype: torch.dtype) -> list[Any]:
        rows, columns = lengths
        q = leaf(2, 4, rows, 16, dtype=dtype)
        k, v = leaf(2, heads, columns, 16, dtype=dtype), leaf(2, heads, columns, 16, dtype=dtype)
        if mask == "bool":
            allowed = torch.rand(2, 1, rows, columns) > 0.3
            return [q, k, v, allowed.index_fill_(-1, torch.tensor([0]), True)]
        if mask:
            given = leaf(1, 4, rows, columns, dtype=dtype).detach()
            return [q, k, v, given.requires_grad_(mask == "wanted")]
        return [q, k, v]

    return make


def _indices(*shape: int, weight: bool = False) -> Callable[..., list[Any]]:
    def make(dtype: torch.dtype) -> list[Any]:
        target = torch.randint(shape[1], (shape[0], *shape[2:]))
        target.view(-1)[0] = 1  # what `ignore_index=1` ignores
        return [
            leaf(*shape, dtype=dtype, scale=2),
            target,
            torch.rand(shape[1]).to(dtype) if weight else None,
        ]

    return make


def _soft(*shape: int, weight: bool = False, wanted: bool = False) -> Callable[..., list[Any]]:
    def make(dtype: torch.dtype) -> list[Any]:
        target = torch.rand(shape, dtype=torch.float64).softmax(1).to(dtype).requires_grad_(wanted)
        return [
            leaf(*shape, dtype=dtype, scale=2),
            target,
            torch.rand(shape[1]).to(dtype) if weight else None,
        ]

    return make


CASES: dict[str, Case] = {
    "linear": Case(F.linear, _tensors((4, 6, 32), (16, 32), (16,))),
    "linear_vector": Case(F.linear, _tensors((32,), (16, 32), (16,))),
    "linear_no_bias": Case(F.linear, _tensors((4, 3, 5, 32), (16, 32))),
    "addmm": Case(torch.addmm, _tensors((16,), (24, 32), (32, 16))),
    "addmm_scaled": Case(torch.addmm, _tensors((24, 16), (24, 32), (32, 16)), {"beta": 0.5, "alpha": 2.0}),
    "conv1d": Case(F.conv1d, _conv((3, 4, 20), (8, 4, 5), 2, 3, 1)),
    "conv2d": Case(F.conv2d, _conv((3, 4, 9, 8), (8, 2, 3, 3), (2, 1), (1, 2), 1, 2)),
    "conv2d_dilated": Case(F.conv2d, _conv((3, 4, 9, 8), (8, 4, 3, 3), 1, 2, (2, 1), bias=False)),
    "conv2d_same": Case(F.conv2d, _conv((3, 4, 9, 8), (8, 4, 4, 3), 1, "same")),
    "conv2d_valid": Case(F.conv2d, _conv((3, 4, 9, 8), (8, 4, 3, 3), 2, "valid")),
    "conv2d_unbatched": Case(F.conv2d, _conv((4, 9, 8), (8, 4, 3, 3), 1, 1)),
    "conv2d_channels_last": Case(F.conv2d, _channels_last),
    "conv3d": Case(F.conv3d, _conv((2, 3, 5, 6, 7), (4, 3, 2, 3, 3), 1, (1, 0, 1))),
    "batch_norm": Case(F.batch_norm, _batch(4, 6, 5, 5, training=True)),
    "batch_norm_1d": Case(F.batch_norm, _batch(24, 6, training=True)),
    "batch_norm_3d": Case(F.batch_norm, _batch(3, 6, 4, 3, 2, training=True)),
    "batch_norm_channels_last": Case(F.batch_norm, _batch_last),
    "batch_norm_plain": Case(F.batch_norm, _batch(4, 6, 5, 5, training=True, affine=False, running=False)),
    "batch_norm_eval": Case(F.batch_norm, _batch(4, 6, 5, 5, training=False)),
    "batch_norm_eval_no_affine": Case(F.batch_norm, _batch(4, 6, 5, 5, training=False, affine=False)),
    "layer_norm": Case(F.layer_norm, _norm),
    "layer_norm_no_affine": Case(F.layer_norm, lambda dtype: _norm(dtype)[:2]),
    "gelu": Case(F.gelu, _tensors((5, 40))),
    "gelu_tanh": Case(F.gelu, _tensors((5, 40)), {"approximate": "tanh"}),
    "relu": Case(F.relu, _tensors((5, 41))),
    "relu_torch": Case(torch.relu, _tensors((5, 41))),
    "softmax": Case(F.softmax, _tensors((4, 6, 20)), {"dim": -1}),
    "softmax_torch": Case(torch.softmax, _tensors((4, 6, 20)), {"dim": 1}),
    "softmax_method": Case(Tensor.softmax, _tensors((4, 6, 20)), {"dim": 0, "dtype": torch.float64}),
    "matmul": Case(torch.matmul, _tensors((2, 3, 5, 16), (2, 3, 16, 7))),
    "matmul_repeated": Case(torch.matmul, _tensors((3, 1, 5, 16), (4, 16, 7))),
    "matmul_folded": Case(torch.matmul, _tensors((2, 5, 16), (16, 7))),
    "matmul_vectors": Case(torch.matmul, _tensors((16,), (16,))),
    "matmul_vector_left": Case(torch.matmul, _tensors((16,), (3, 16, 7))),
    "matmul_vector_right": Case(Tensor.matmul, _tensors((2, 5, 16), (16,))),
    "bmm": Case(torch.bmm, _tensors((3, 5, 16), (3, 16, 7))),
    "mm": Case(Tensor.mm, _tensors((5, 16), (16, 7))),
    "baddbmm": Case(torch.baddbmm, _tensors((1, 5, 7), (3, 5, 16), (3, 16, 7)), {"beta": 2, "alpha": 0.5}),
    "attention": Case(F.scaled_dot_product_attention, _attention(heads=4)),
    "attention_causal": Case(F.scaled_dot_product_attention, _attention(heads=4), {"is_causal": True}),
    "attention_causal_oblong": Case(
        F.scaled_dot_product_attention, _attention((12, 9), heads=4), {"is_causal": True}
    ),
    "attention_scale": Case(F.scaled_dot_product_attention, _attention((7, 13), heads=4), {"scale": 0.4}),
    "attention_grouped": Case(F.scaled_dot_product_attention, _attention(), {"enable_gqa": True}),
    "attention_bool_mask": Case(F.scaled_dot_product_attention, _attention(mask="bool", heads=4)),
    "attention_float_mask": Case(F.scaled_dot_product_attention, _attention(mask="float", heads=4)),
    "attention_trained_mask": Case(F.scaled_dot_product_attention, _attention(mask="wanted", heads=4)),
    "attention_3d": Case(F.scaled_dot_product_attention, _tensors((3, 12, 16), (3, 12, 16), (3, 12, 16))),
    "attention_dropout": Case(F.scaled_dot_product_attention, _attention(heads=4), {"dropout_p": 0.2}),
    "cross_entropy": Case(F.cross_entropy, _indices(12, 10)),
    "cross_entropy_all": Case(
        F.cross_entropy, _indices(12, 10, weight=True), {"label_smoothing": 0.2, "ignore_index": 1}
    ),
    "cross_entropy_sum": Case(
        F.cross_entropy, _indices(6, 10, 3, 2, weight=True), {"reduction": "sum", "label_smoothing": 0.1}
    ),
    "cross_entropy_none": Case(F.cross_entropy, _indices(6, 10, 3), {"reduction": "none", "ignore_index": 1}),
    "cross_entropy_soft": Case(F.cross_entropy, _soft(12, 10, weight=True), {"label_smoothing": 0.1}),
    "cross_entropy_soft_wanted": Case(F.cross_entropy, _soft(6, 10, 4, wanted=True), {"reduction": "none"}),
    "cross_entropy_soft_sum": Case(F.cross_entropy, _soft(6, 10), {"reduction": "sum"}),
    "cross_entropy_one": Case(
        F.cross_entropy, lambda dtype: [leaf(10, dtype=dtype), torch.tensor(3)], {"label_smoothing": 0.1}
    ),
}


def fresh(case: Case, dtype: torch.dtype, seed: int = 0) -> list[Any]:
    """The case's arguments, the same ones for the same seed."""
    torch.manual_seed(seed)
    return case.make(dtype)


def leaves(args: list[Any]) -> list[Tensor]:
    """The arguments that want gradients."""
    return [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]


def gradients(output: Tensor, args: list[Any]) -> list[Tensor]:
    """Gradients of the arguments that want them, for a fixed incoming gradient."""
    generator = torch.Generator().manual_seed(7)
    incoming = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    return list(torch.autograd.grad(output, leaves(args), incoming))
