"""One case a way of calling a routed torch function: how to make its arguments, and what to know of it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mesa_tune.codecs import Spec
from mesa_tune.engine.call import Call
from mesa_tune.engine.rematerialize import Traced
from mesa_tune.formulas.matmul import GROUPED_MM
from mesa_tune.formulas.table import ROUTES

EIGHT = Spec("quantize", 8, 256, 256, 0, True, 0)
RAW = EIGHT._replace(levels=0)
KEY = torch.tensor([12345])

Make = Callable[..., list[Any]]


class Case(NamedTuple):
    """`function(*make(dtype), **kwargs)`; tensors that want gradients require them.

    `limited`: PyTorch runs it neither in float64 nor in traced code on the CPU.
    """

    function: Callable[..., Any]
    make: Callable[[torch.dtype], list[Any]]
    kwargs: dict[str, Any] = {}  # noqa: RUF012
    limited: bool = False


def leaf(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """A normal tensor that wants a gradient."""
    return (torch.randn(shape, dtype=torch.float64) * scale).to(dtype).requires_grad_()


class Bare:
    """The context of a call in which nothing is a parameter or batch."""

    def __init__(self) -> None:
        self.traced: Traced = []

    def key(self, device: torch.device) -> Tensor:
        return KEY

    def is_static(self, tensor: Tensor) -> bool:
        return False

    def note(self, layer: str) -> None: ...


def served(function: Callable[..., Any], spec: Spec, *args: Any, **kwargs: Any) -> Any:
    """The call by our function, with `spec`, nothing being a parameter or batch."""
    return Call("layer", spec, Bare(), function, args, kwargs).run_by(ROUTES[function])


def _tensors(*shapes: tuple[int, ...] | str) -> Callable[[torch.dtype], list[Any]]:
    """Tensors of these shapes; a text stays as it is."""
    return lambda dtype: [each if isinstance(each, str) else leaf(*each, dtype=dtype) for each in shapes]


def _first(shape: tuple[int, ...], *rest: Any) -> Callable[[torch.dtype], list[Any]]:
    return lambda dtype: [leaf(*shape, dtype=dtype), *rest]


def _conv(x: tuple[int, ...], w: tuple[int, ...], *rest: Any, bias: int = -1) -> Make:
    """Input, weight, bias of as many elements, by default of `w`'s first dimension, and what follows."""

    def make(dtype: torch.dtype) -> list[Any]:
        given = [leaf(*x, dtype=dtype), leaf(*w, dtype=dtype, scale=0.3)]
        return [*given, leaf(w[0] if bias < 0 else bias, dtype=dtype) if bias else None, *rest]

    return make


def _channels_last(dtype: torch.dtype) -> list[Any]:
    x = leaf(3, 4, 8, 6, dtype=dtype).detach().contiguous(memory_format=torch.channels_last)
    return [x.requires_grad_(), leaf(8, 4, 3, 3, dtype=dtype), None, 1, 1]


def _norm(dtype: torch.dtype) -> list[Any]:
    return [leaf(6, 5, 32, dtype=dtype, scale=3), (32,), leaf(32, dtype=dtype), leaf(32, dtype=dtype)]


def _grouped(shape: tuple[int, ...], groups: int) -> Make:
    return lambda dtype: [
        *(leaf(*shape, dtype=dtype, scale=2), groups),
        *(leaf(shape[1], dtype=dtype) for _ in range(2)),
    ]


def _batch(*shape: int, training: bool, affine: bool = True, running: bool = True) -> Make:
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


def _attention(lengths: tuple[int, int] = (12, 12), mask: str = "", heads: int = 2) -> Make:
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


def _indices(*shape: int, weight: bool = False) -> Make:
    def make(dtype: torch.dtype) -> list[Any]:
        target = torch.randint(shape[1], (shape[0], *shape[2:]))
        target.view(-1)[0] = 1  # what `ignore_index=1` ignores
        x, weights = leaf(*shape, dtype=dtype, scale=2), torch.rand(shape[1]).to(dtype)
        return [x, target, weights if weight else None]

    return make


def _soft(*shape: int, weight: bool = False, wanted: bool = False) -> Make:
    def make(dtype: torch.dtype) -> list[Any]:
        target = torch.rand(shape, dtype=torch.float64).softmax(1).to(dtype).requires_grad_(wanted)
        x, weights = leaf(*shape, dtype=dtype, scale=2), torch.rand(shape[1]).to(dtype)
        return [x, target, weights if weight else None]

    return make


def _away(*shape: int, low: float = 0.3) -> Callable[[torch.dtype], list[Any]]:
    """One tensor of positive numbers, none of them near zero."""
    return lambda dtype: [(torch.rand(shape, dtype=torch.float64) + low).to(dtype).requires_grad_()]


def _quotient(a: tuple[int, ...], b: tuple[int, ...]) -> Callable[[torch.dtype], list[Any]]:
    return lambda dtype: [leaf(*a, dtype=dtype), *_away(*b, low=0.5)(dtype)]


def _chosen(mask: tuple[int, ...], *shapes: tuple[int, ...]) -> Callable[[torch.dtype], list[Any]]:
    return lambda dtype: [torch.rand(mask) > 0.4, *(leaf(*shape, dtype=dtype) for shape in shapes)]


def _shares(dtype: torch.dtype, log: bool = False) -> list[Any]:
    target = torch.randn(6, 20, dtype=torch.float64).log_softmax(-1)
    return [leaf(6, 20, dtype=dtype), (target if log else target.exp()).to(dtype)]


def _binary(dtype: torch.dtype, logits: bool = True) -> list[Any]:
    x = torch.randn(6, 20, dtype=torch.float64)
    weight = torch.rand(20) + 0.5
    target = torch.rand(6, 20).to(dtype)
    return [(x if logits else x.sigmoid()).to(dtype).requires_grad_(), target, weight.to(dtype)]


def _by_expert(dtype: torch.dtype, transposed: bool = False) -> list[Any]:
    weight = leaf(3, 32, 16, dtype=dtype) if not transposed else leaf(3, 16, 32, dtype=dtype).mT
    return [leaf(24, 32, dtype=dtype), weight, torch.tensor([5, 14, 24], dtype=torch.int32)]


def _long_and_short(*shape: int) -> Callable[[torch.dtype], list[Any]]:
    """Rows of lengths from a thousandth to ten, one of them zero."""

    def make(dtype: torch.dtype) -> list[Any]:
        x = leaf(*shape, dtype=torch.float64).detach() * torch.logspace(-3, 1, shape[0]).view(-1, 1, 1)
        x[1, 2] = 0
        return [x.to(dtype).requires_grad_()]

    return make


_sdpa = F.scaled_dot_product_attention
_CURVES: tuple[Any, ...] = (
    *(F.gelu, F.relu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.logsigmoid, F.softsign, F.tanhshrink),
    *(F.selu, F.hardshrink, torch.tanh, torch.exp, torch.square, torch.sin, torch.cos, torch.erf, torch.abs),
    *(torch.erfc, torch.atan, torch.asinh),
)

CASES: dict[str, Case] = {
    "amax": Case(torch.amax, _tensors((4, 6, 20)), {"dim": -1}),
    "amax_of_all": Case(Tensor.amax, _tensors((4, 60))),
    "amin_kept": Case(torch.amin, _tensors((4, 6, 20)), {"dim": (0, 2), "keepdim": True}),
    "max_of_all": Case(torch.max, _tensors((4, 60))),
    "min_of_all": Case(Tensor.min, _tensors((4, 60))),
    "maximum": Case(torch.maximum, _tensors((4, 60), (60,))),
    "min_of_two": Case(torch.min, _tensors((4, 60), (4, 60))),
    "minimum": Case(torch.minimum, _tensors((4, 60), (4, 1))),
    "logsumexp": Case(torch.logsumexp, _tensors((4, 6, 40)), {"dim": -1}),
    "logsumexp_kept": Case(Tensor.logsumexp, _tensors((4, 6, 40)), {"dim": (0, 2), "keepdim": True}),
    "vector_norm": Case(torch.linalg.vector_norm, _long_and_short(4, 6, 40), {"dim": -1}),
    "norm": Case(Tensor.norm, _long_and_short(4, 6, 40), {"p": 2, "dim": 1, "keepdim": True}),
    "norm_of_all": Case(torch.norm, _tensors((4, 60))),
    "norm_1": Case(torch.linalg.norm, _tensors((4, 60)), {"ord": 1, "dim": -1}),
    "normalize": Case(F.normalize, _long_and_short(4, 6, 40), {"dim": -1, "eps": 1e-2}),
    "cosine_similarity": Case(F.cosine_similarity, _tensors((4, 6, 40), (6, 40)), {"dim": -1}),
    "cosine_similarity_short": Case(
        F.cosine_similarity, _tensors((4, 6, 40), (4, 1, 40)), {"dim": 2, "eps": 6.0}
    ),
    "var": Case(torch.var, _long_and_short(4, 6, 40), {"dim": -1}),
    "std": Case(Tensor.std, _long_and_short(4, 6, 40), {"dim": (1, 2), "correction": 0, "keepdim": True}),
    "std_of_all": Case(torch.std, _tensors((4, 60)), {"unbiased": False}),
    "grouped_mm": Case(GROUPED_MM, _by_expert, limited=True),
    "grouped_mm_transposed": Case(GROUPED_MM, partial(_by_expert, transposed=True), limited=True),
    "linear": Case(F.linear, _tensors((4, 6, 32), (16, 32), (16,))),
    "linear_vector": Case(F.linear, _tensors((32,), (16, 32), (16,))),
    "linear_no_bias": Case(F.linear, _tensors((4, 3, 5, 32), (16, 32))),
    "addmm": Case(torch.addmm, _tensors((16,), (24, 32), (32, 16))),
    "addmm_scaled": Case(torch.addmm, _tensors((24, 16), (24, 32), (32, 16)), {"beta": 0.5, "alpha": 2.0}),
    "conv1d": Case(F.conv1d, _conv((3, 4, 20), (8, 4, 5), 2, 3, 1)),
    "conv2d": Case(F.conv2d, _conv((3, 4, 9, 8), (8, 2, 3, 3), (2, 1), (1, 2), 1, 2)),
    "conv2d_dilated": Case(F.conv2d, _conv((3, 4, 9, 8), (8, 4, 3, 3), 1, 2, (2, 1), bias=0)),
    "conv2d_same": Case(F.conv2d, _conv((3, 4, 9, 8), (8, 4, 4, 3), 1, "same")),
    "conv2d_valid": Case(F.conv2d, _conv((3, 4, 9, 8), (8, 4, 3, 3), 2, "valid")),
    "conv2d_unbatched": Case(F.conv2d, _conv((4, 9, 8), (8, 4, 3, 3), 1, 1)),
    "conv2d_channels_last": Case(F.conv2d, _channels_last),
    "conv3d": Case(F.conv3d, _conv((2, 3, 5, 6, 7), (4, 3, 2, 3, 3), 1, (1, 0, 1))),
    "conv_transpose1d": Case(F.conv_transpose1d, _conv((3, 4, 9), (4, 6, 5), 2, 1, 1, 1, 2, bias=6)),
    "conv_transpose2d": Case(
        F.conv_transpose2d, _conv((3, 4, 5, 6), (4, 3, 3, 2), (2, 3), (1, 0), (0, 2), 2, bias=6)
    ),
    "conv_transpose2d_plain": Case(F.conv_transpose2d, _conv((4, 5, 6), (4, 3, 3, 2), bias=0)),
    "conv_transpose3d": Case(F.conv_transpose3d, _conv((2, 3, 3, 4, 5), (3, 4, 2, 3, 3), 2, 1, 1, bias=4)),
    "bilinear": Case(F.bilinear, _tensors((4, 6, 32), (4, 6, 16), (8, 32, 16), (8,))),
    "bilinear_vector": Case(F.bilinear, _tensors((32,), (16,), (8, 32, 16))),
    "batch_norm": Case(F.batch_norm, _batch(4, 6, 5, 5, training=True)),
    "batch_norm_1d": Case(F.batch_norm, _batch(24, 6, training=True)),
    "batch_norm_3d": Case(F.batch_norm, _batch(3, 6, 4, 3, 2, training=True)),
    "batch_norm_channels_last": Case(F.batch_norm, _batch_last),
    "batch_norm_plain": Case(F.batch_norm, _batch(4, 6, 5, 5, training=True, affine=False, running=False)),
    "batch_norm_eval": Case(F.batch_norm, _batch(4, 6, 5, 5, training=False)),
    "batch_norm_eval_no_affine": Case(F.batch_norm, _batch(4, 6, 5, 5, training=False, affine=False)),
    "layer_norm": Case(F.layer_norm, _norm),
    "layer_norm_no_affine": Case(F.layer_norm, lambda dtype: _norm(dtype)[:2]),
    "rms_norm": Case(F.rms_norm, lambda dtype: _norm(dtype)[:3]),
    "rms_norm_two_dims": Case(
        torch.rms_norm, lambda dtype: [leaf(6, 5, 32, dtype=dtype), (5, 32), leaf(5, 32, dtype=dtype), 1e-3]
    ),
    "rms_norm_no_affine": Case(F.rms_norm, _first((6, 32), (32,))),
    "group_norm": Case(F.group_norm, _grouped((4, 6, 5, 4), 3)),
    "group_norm_one": Case(F.group_norm, _grouped((4, 6, 20), 1)),
    "group_norm_flat": Case(F.group_norm, _grouped((24, 12), 3)),
    "group_norm_no_affine": Case(F.group_norm, _first((2, 6, 4, 3, 3), 6)),
    "instance_norm": Case(F.instance_norm, lambda dtype: [leaf(4, 6, 5, 5, dtype=dtype, scale=2)]),
    "instance_norm_all": Case(F.instance_norm, _batch(4, 6, 20, training=True)),
    "instance_norm_eval": Case(F.instance_norm, _batch(4, 6, 5, 5, training=False)),
    "instance_norm_3d": Case(F.instance_norm, _batch(3, 6, 4, 3, 2, training=True, running=False)),
    **{f.__name__: Case(f, _tensors((5, 41))) for f in _CURVES},
    "gelu_tanh": Case(F.gelu, _tensors((5, 40)), {"approximate": "tanh"}),
    "relu_torch": Case(torch.relu, _tensors((5, 41))),
    "softplus": Case(F.softplus, _tensors((5, 40)), {"beta": 1.5, "threshold": 1.0}),
    "elu": Case(F.elu, _tensors((5, 40)), {"alpha": 0.7}),
    "celu": Case(F.celu, _tensors((5, 40)), {"alpha": 0.75}),
    "sigmoid_method": Case(Tensor.sigmoid, _tensors((5, 40))),
    "expm1": Case(Tensor.expm1, _tensors((5, 40))),
    "pow_2": Case(Tensor.pow, _first((5, 40), 2)),
    "pow_3": Case(Tensor.__pow__, _first((5, 40), 3.0)),
    "pow_of_number": Case(torch.pow, lambda dtype: [2.5, leaf(5, 40, dtype=dtype)]),
    "rpow": Case(Tensor.__rpow__, _first((5, 40), 3)),
    "relu6": Case(F.relu6, lambda dtype: [leaf(5, 41, dtype=dtype, scale=8)]),
    "hardtanh": Case(F.hardtanh, _tensors((5, 41)), {"min_val": -0.5, "max_val": 0.7}),
    "leaky_relu": Case(F.leaky_relu, _tensors((5, 41)), {"negative_slope": 0.2}),
    "threshold": Case(F.threshold, _first((5, 41), 0.3, -2.0)),
    "softshrink": Case(F.softshrink, _tensors((5, 41)), {"lambd": 0.3}),
    "clamp": Case(torch.clamp, _first((5, 41), -0.5, 0.7)),
    "clamp_min": Case(Tensor.clamp_min, _first((5, 41), 0.1)),
    "clamp_max": Case(Tensor.clamp_max, _first((5, 41), 0.1)),
    "clamp_low": Case(Tensor.clamp, _tensors((5, 41)), {"min": 0.1}),
    "mul": Case(torch.mul, _tensors((5, 40), (5, 40))),
    "mul_repeated": Case(Tensor.mul, _tensors((4, 1, 40), (5, 40))),
    "mul_constant": Case(torch.mul, lambda dtype: [leaf(5, 40, dtype=dtype), torch.rand(5, 40).to(dtype)]),
    "div": Case(torch.div, _quotient((5, 40), (5, 40))),
    "div_repeated": Case(Tensor.div, _quotient((4, 5, 40), (4, 5, 1))),
    "addcmul": Case(torch.addcmul, _tensors((40,), (5, 40), (5, 40)), {"value": 0.5}),
    "glu": Case(F.glu, _tensors((5, 80))),
    "glu_first": Case(F.glu, _tensors((6, 5, 8)), {"dim": 0}),
    "where": Case(torch.where, _chosen((5, 40), (5, 40), (5, 40))),
    "where_repeated": Case(torch.where, _chosen((1, 5, 40), (4, 5, 40), (40,))),
    "masked_fill": Case(Tensor.masked_fill, _first((4, 5, 40), torch.arange(200).view(5, 40) % 7 < 4, -2.0)),
    "einsum": Case(torch.einsum, _tensors("bhid,bhjd->bhij", (2, 3, 5, 16), (2, 3, 7, 16))),
    "einsum_dots": Case(torch.einsum, _tensors("...ij,jk->...ki", (2, 3, 5, 16), (16, 7))),
    "einsum_implied": Case(torch.einsum, _tensors("ij,kj", (5, 16), (7, 16))),
    "einsum_summed": Case(torch.einsum, _tensors("abc,cde->bd", (4, 5, 16), (16, 7, 3))),
    "einsum_repeated": Case(torch.einsum, _tensors("...d,...d->...", (4, 1, 16), (5, 16))),
    "einsum_outer": Case(torch.einsum, _tensors("bi,bj->bij", (4, 16), (4, 15))),
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
    "attention": Case(_sdpa, _attention(heads=4)),
    "attention_causal": Case(_sdpa, _attention(heads=4), {"is_causal": True}),
    "attention_causal_oblong": Case(_sdpa, _attention((12, 9), heads=4), {"is_causal": True}),
    "attention_scale": Case(_sdpa, _attention((7, 13), heads=4), {"scale": 0.4}),
    "attention_grouped": Case(_sdpa, _attention(), {"enable_gqa": True}),
    "attention_bool_mask": Case(_sdpa, _attention(mask="bool", heads=4)),
    "attention_float_mask": Case(_sdpa, _attention(mask="float", heads=4)),
    "attention_trained_mask": Case(_sdpa, _attention(mask="wanted", heads=4)),
    "attention_3d": Case(_sdpa, _tensors((3, 12, 16), (3, 12, 16), (3, 12, 16))),
    "attention_2d": Case(_sdpa, _tensors((12, 16), (9, 16), (9, 16))),
    "attention_dropout": Case(_sdpa, _attention(heads=4), {"dropout_p": 0.2}),
    "log_softmax": Case(F.log_softmax, _tensors((4, 6, 20)), {"dim": -1}),
    "log_softmax_wide": Case(Tensor.log_softmax, _tensors((4, 6, 20)), {"dim": 1, "dtype": torch.float64}),
    "nll_loss": Case(F.nll_loss, _indices(12, 10)),
    "nll_loss_all": Case(F.nll_loss, _indices(6, 10, 3, weight=True), {"ignore_index": 1}),
    "nll_loss_sum": Case(F.nll_loss, _indices(6, 10, 3, 2, weight=True), {"reduction": "sum"}),
    "nll_loss_none": Case(F.nll_loss, _indices(6, 10), {"reduction": "none", "ignore_index": 1}),
    "nll_loss_one": Case(F.nll_loss, _first((10,), torch.tensor(3))),
    "mse_loss": Case(F.mse_loss, _tensors((6, 20), (6, 20))),
    "mse_loss_repeated": Case(F.mse_loss, _tensors((6, 20), (20,)), {"reduction": "sum"}),
    "l1_loss": Case(F.l1_loss, _tensors((6, 20), (6, 20)), {"reduction": "none"}),
    "smooth_l1_loss": Case(F.smooth_l1_loss, _tensors((6, 20), (6, 20)), {"beta": 0.4}),
    "huber_loss": Case(F.huber_loss, _tensors((6, 20), (6, 20)), {"delta": 0.6}),
    "kl_div": Case(F.kl_div, _shares, {"reduction": "batchmean"}),
    "kl_div_log": Case(F.kl_div, partial(_shares, log=True), {"reduction": "sum", "log_target": True}),
    "binary_cross_entropy": Case(F.binary_cross_entropy, partial(_binary, logits=False)),
    "binary_cross_entropy_logits": Case(
        F.binary_cross_entropy_with_logits, _binary, {"pos_weight": torch.tensor(2.5), "reduction": "sum"}
    ),
    "dropout": Case(F.dropout, _tensors((5, 40)), {"p": 0.3}),
    "dropout_torch": Case(torch.dropout, _first((5, 41), 0.2, True)),
    "dropout2d": Case(F.dropout2d, _tensors((6, 5, 4, 4))),
    "dropout3d": Case(F.dropout3d, _tensors((4, 5, 4, 2, 2)), {"p": 0.3}),
    "alpha_dropout": Case(F.alpha_dropout, _tensors((5, 40)), {"p": 0.3, "training": True}),
    "feature_alpha_dropout": Case(F.feature_alpha_dropout, _tensors((8, 9, 5)), {"training": True}),
    "max_pool1d": Case(F.max_pool1d, _first((3, 4, 20), 3, 2, 1)),
    "max_pool2d": Case(F.max_pool2d, _first((3, 4, 9, 8), 3, 2, 1)),
    "max_pool2d_all": Case(F.max_pool2d, _first((3, 4, 11, 9), (3, 2), (2, 3), (1, 0), (2, 1), True)),
    "max_pool2d_unbatched": Case(torch.max_pool2d, _first((4, 9, 8), 2)),
    "max_pool2d_channels_last": Case(F.max_pool2d, lambda dtype: [*_channels_last(dtype)[:1], 3, 2, 1]),
    "max_pool3d": Case(F.max_pool3d, _first((2, 3, 6, 7, 8), (2, 3, 2), 2, (1, 1, 0))),
    "adaptive_max_pool1d": Case(F.adaptive_max_pool1d, _first((3, 4, 20), 7)),
    "adaptive_max_pool2d": Case(F.adaptive_max_pool2d, _first((3, 4, 9, 8), (4, None))),
    "adaptive_max_pool3d": Case(F.adaptive_max_pool3d, _first((3, 5, 6, 7), (2, 4, 3))),
    "avg_pool1d": Case(F.avg_pool1d, _first((3, 4, 20), 3, 2, 1)),
    "avg_pool2d": Case(F.avg_pool2d, _first((3, 4, 9, 8), (3, 2), 2, (1, 0), True, False)),
    "avg_pool2d_unbatched": Case(F.avg_pool2d, _first((4, 9, 8), 2)),
    "adaptive_avg_pool1d": Case(F.adaptive_avg_pool1d, _first((4, 20), 7)),
    "adaptive_avg_pool2d": Case(F.adaptive_avg_pool2d, _first((3, 4, 9, 8), (4, None))),
    "adaptive_avg_pool3d": Case(F.adaptive_avg_pool3d, _first((2, 3, 5, 6, 7), 3)),
    "pad_reflect": Case(F.pad, _first((3, 4, 9, 8), (1, 2, 3, 0), "reflect")),
    "pad_replicate": Case(F.pad, _first((3, 4, 20), (1, 2), "replicate")),
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
    "cross_entropy_one": Case(F.cross_entropy, _first((10,), torch.tensor(3)), {"label_smoothing": 0.1}),
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
