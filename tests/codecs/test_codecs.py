"""What every codec of the table must do, whatever the shape, dtype, strides and settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mesa_tune as mt
from mesa_tune.codecs import CODECS, Memory, Spec, quantize
from mesa_tune.engine.storage import refusal
from mesa_tune.formulas.activation import fixed_levels
from mesa_tune.ops import DTYPES
from mesa_tune.ops.codecs import RAW
from mesa_tune.policy.settings import MOST_FIXED_LEVELS, LayerSettings, beside_rows
from tests.builders import gradients, known

KEY = torch.tensor([7], dtype=torch.int64)
BY_NAME = {
    "quantize": LayerSettings(level=16),
    "running": LayerSettings(level=16, ema_decay=0.9),
    "drop": LayerSettings(level=16, drop=0.5),
    "drop-exact": LayerSettings(drop=0.5, store="exact"),
    "vrandom": LayerSettings(drop=0.5, store="exact"),
    "rows": LayerSettings(level=16, rows=0.5),
    "rows-exact": LayerSettings(rows=0.5, store="exact"),
    "levels": LayerSettings(level=4, store="levels"),
    "mixed": LayerSettings(level=16, allocation="sample"),
    "offload": LayerSettings(store="offload"),
}
SHAPES = [(), (0,), (1,), (3, 0, 2), (13,), (7, 11), (2, 3, 5), (4, 6, 3, 5), (2, 3, 2, 3, 5), (1, 4097)]


def layer_of(groups: dict[str, Any], **others: Any) -> LayerSettings:
    """The settings, without `rows` where it does not go with them, and with few levels if they are fixed."""
    rows = 1.0 if beside_rows({**groups, **others}) else others["rows"]
    level = min(others["level"], MOST_FIXED_LEVELS) if others["store"] == "levels" else others["level"]
    return LayerSettings(**{**groups, **others, "rows": rows, "level": level})


layer_settings = st.builds(
    layer_of,
    st.sampled_from(
        [{"group_size": n} for n in (1, 3, 64, 256)]
        + [{"group_size": None, "quant_groups": n} for n in (1, 3)]
    ),
    level=st.integers(2, 256),
    ema_decay=st.sampled_from([0.0, 0.9]),
    rounding=st.sampled_from(["stochastic", "nearest"]),
    drop=st.sampled_from([0.0, 0.0, 0.3, 0.9, 0.999]),
    rows=st.sampled_from([1.0, 1.0, 0.7, 0.1, 0.001]),
    allocation=st.sampled_from(["uniform", "sample"]),
    store=st.sampled_from(["quantize", "quantize", "exact", "offload", "levels"]),
).filter(lambda layer: not layer.exact)


def spec_of(layer: LayerSettings, codec: str | None = None) -> Spec:
    spec = known(Spec.of(layer, 0))
    spec = spec.valued(fixed_levels("gelu", ("none",), spec.levels)) if spec.codec == "levels" else spec
    return spec if codec is None else spec._replace(codec=codec)


def round_trip(x: Tensor, spec: Spec, memory: Memory | None = None) -> tuple[list[Tensor], Tensor]:
    parts = CODECS[spec.codec].encode(x, spec, KEY, memory)
    return parts, CODECS[spec.codec].decode(parts, x.shape, x.dtype, spec)


def all_bytes(parts: list[Tensor]) -> int:
    return sum(part.untyped_storage().nbytes() for part in parts)


def laid_out(x: Tensor, how: str) -> Tensor:
    """x with other strides, or a tensor near it for layouts that its shape cannot have."""
    if how == "transposed" and x.dim() > 1:
        return x.transpose(0, -1)
    if how == "sliced" and x.dim() > 1:
        return torch.cat([x, x], -1)[..., 1 : x.shape[-1] + 1]
    if how == "expanded":
        return x.unsqueeze(0).expand(2, *x.shape)
    if how == "channels_last" and x.dim() in (4, 5):
        layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        return x.contiguous(memory_format=layout)
    return x


def test_the_table_is_complete() -> None:
    assert {each.split("-")[0] for each in BY_NAME} == set(CODECS)


@pytest.mark.filterwarnings("ignore:mesa-tune. .* has no effect")
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    layer_settings,
    st.one_of(st.sampled_from(SHAPES), st.lists(st.integers(0, 7), max_size=5).map(tuple)),
    st.sampled_from(DTYPES),
    st.sampled_from(["", "transposed", "sliced", "expanded", "channels_last"]),
    st.booleans(),
)
def test_shape_dtype_bytes_and_values(
    layer: LayerSettings, shape: tuple[int, ...], dtype: torch.dtype, how: str, remembers: bool
) -> None:
    spec = spec_of(layer)
    generator = torch.Generator().manual_seed(math.prod(shape))
    x = laid_out(torch.randn(shape, generator=generator).to(dtype), how)
    if refusal(x.to("meta"), spec) is not None:
        return
    before = x.clone()
    parts, decoded = round_trip(x, spec, {} if remembers else None)
    assert torch.equal(x, before)
    assert decoded.shape == x.shape
    assert decoded.dtype == x.dtype
    assert torch.isfinite(decoded).all()
    if spec.codec != "offload":
        assert all_bytes(parts) == CODECS[spec.codec].packed_bytes(x.shape, spec, x.element_size())
    # Norms of rows are sums, which depend on the layout in their last bits.
    other = x.contiguous() if spec.rows == 1 else x.clone()
    again, same = round_trip(other, spec, {} if remembers else None)
    assert torch.equal(decoded, same)
    assert all(torch.equal(one, other) for one, other in zip(parts, again, strict=True))
    if x.numel() and spec.rows == 1 and spec.codebook is None:
        span = (x.max() - x.min()).float()
        kept = decoded != 0 if spec.drop else torch.ones_like(decoded, dtype=torch.bool)
        assert ((decoded - x).abs().float()[kept] <= span * 1.01 + 1e-6).all()


HALF = [dtype for dtype in DTYPES if dtype.itemsize == 2]


@pytest.mark.parametrize(
    ("scale", "level"), [(1e-30, 256), (1.0, 4), (1e4, 10), (math.inf, 2), (math.inf, 256)], ids=str
)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_ends_in_half_precision_are_ranges_in_single(dtype: torch.dtype, scale: float, level: int) -> None:
    spec = spec_of(LayerSettings(level=level, group_size=64))
    limit = torch.finfo(dtype).max
    x = (torch.randn(40, 64, dtype=torch.double) + torch.randn(40, 1)) * min(scale, limit)
    x = x.clamp(-limit, limit).to(dtype)
    x[3] = x[3, 0]
    parts, decoded = round_trip(x, spec)
    wide = quantize.encode_with_ranges(x, spec, KEY)
    assert torch.equal(parts[0], wide[0])
    assert parts[1].nbytes == wide[1].nbytes // 2
    # From ends to ranges and back, a step may change in its last bit, and so what is rounded to `dtype`.
    nearby = quantize.decode(wide, x.shape, dtype, spec).double()
    step = (x.double().amax(1, keepdim=True) - x.double().amin(1, keepdim=True)) * torch.finfo(dtype).eps
    assert ((decoded.double() - nearby).abs() <= step + nearby.abs() * torch.finfo(dtype).eps).all()
    low, high = x.double().aminmax(dim=1, keepdim=True)
    assert (decoded.double() >= low).all()
    assert (decoded.double() <= high).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BY_NAME)
def test_nan_and_infinity_never_come_back_as_numbers(name: str, dtype: torch.dtype) -> None:
    spec = spec_of(BY_NAME[name], name.split("-", maxsplit=1)[0])
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.randn(8, 300).to(dtype)
        x[3, 17] = bad
        if spec.codec == "vrandom":  # chooses without looking, so the element may be gone
            continue
        memory: Memory = {}
        round_trip(torch.randn(8, 300).to(dtype), spec, memory)
        decoded = round_trip(x, spec, memory)[1]
        assert not torch.isfinite(decoded[3, 17]), name
        after = round_trip(torch.randn(8, 300).to(dtype), spec, memory)[1]
        assert torch.isfinite(after).all(), "one bad step must not stay"


@pytest.mark.parametrize("name", ["quantize", "running", "mixed", "rows"])
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    spec = spec_of(replace(BY_NAME[name], level=4))
    x = torch.randn(6, 512)
    codec = CODECS[spec.codec]
    packed = [codec.encode(x, spec, torch.tensor([key]), {}) for key in range(400)]
    drawn = torch.stack([codec.decode(parts, x.shape, x.dtype, spec) for parts in packed])
    assert (drawn.mean(0) - x).square().sum() < 1.15 * drawn.var(0).sum() / len(drawn)


@pytest.mark.parametrize("name", BY_NAME)
def test_codecs_trace(name: str) -> None:
    spec = spec_of(BY_NAME[name], name.split("-", maxsplit=1)[0])
    x = torch.randn(6, 40, 32)

    def stored(x: Tensor, key: Tensor) -> Tensor:
        codec = CODECS[spec.codec]
        return codec.decode(codec.encode(x, spec, key), x.shape, x.dtype, spec)

    compiled = torch.compile(stored, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, KEY), stored(x, KEY))


DECODED = (6, 50), torch.float32
OPS: dict[str, Callable[[Tensor], tuple[object, ...]]] = {
    "extents": lambda x: (x, 64, 0),
    "quantize_within": lambda x: (x, RAW.extents(x, 64, 0), 4, 10, 64, 0, True, KEY),
    "sparsify": lambda x: (x, 33),
    "densify": lambda x: (*RAW.sparsify(x, 33), (6, 50)),
    "choose_rows": lambda x: (x[:, 0].abs(), 3, KEY),
    "sample_rows": lambda x: (x, -1, 3, KEY),
    "pack_positions": lambda x: (RAW.sparsify(x, 33)[0], 300, 33, 3),
    "unpack_positions": lambda x: (RAW.pack_positions(RAW.sparsify(x, 33)[0], 300, 33, 3), 300, 33, 3),
    "pack_levels": lambda x: (x, [-0.5, 0.0, 0.5], 2),
    "unpack_levels": lambda x: (*RAW.pack_levels(x, [0.0, 0.5], 0), [-1.0, 0.25, 1.0], *DECODED),
    "quantize_samples": lambda x: (x, 4, 64, 0, True, KEY, None),
    "dequantize_samples": lambda x: (*RAW.quantize_samples(x, 4, 64, 0, True, KEY, None), *DECODED, 64, 0),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_are_what_they_say_to_compilers(name: str) -> None:
    op = getattr(RAW, name).default
    torch.library.opcheck(op, OPS[name](torch.randn(6, 50)))


EACH = ["running", "drop", "drop-exact", "mixed", "rows", "levels"]


def one_of_each(without: str = "") -> nn.Module:
    """Linear layers and a tanh, each stored by another codec."""
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Linear(32, 32) for _ in EACH[:-1]), nn.Tanh())
    stored = [BY_NAME["quantize" if name == without else name] for name in EACH]
    tags = [*(("fc", index) for index in range(len(EACH) - 1)), ("pointwise", 0)]
    policy = mt.Policy.from_assignments(
        (tag, index, str(place), settings)
        for place, ((tag, index), settings) in enumerate(zip(tags, stored, strict=True))
    )
    return mt.convert(made, policy, seed=1)


@pytest.mark.slow("compile")
@pytest.mark.filterwarnings("ignore:mesa-tune. under torch.compile")
def test_compiled_models_train_as_eager_ones_do() -> None:
    """Running ranges are the tensors' own there."""
    eager, traced = one_of_each(without="running"), one_of_each()
    run = torch.compile(traced, fullgraph=True, backend="aot_eager")
    x = torch.linspace(-1, 1, 256 * 32).view(256, 32).requires_grad_()
    found, right = gradients(traced, x, run=run), gradients(eager, x)
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_second_backward_gives_the_same_gradient() -> None:
    model = one_of_each()
    loss = model((torch.randn(256, 32) * 1).requires_grad_()).square().mean()
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
