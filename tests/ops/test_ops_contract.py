"""The ops as PyTorch sees them: opcheck, compilers, fake tensors; and what happens without the library."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses import FakeTensorMode

from mesa_tune import ops

SIZES = (4, 16, 64, 0)
x = torch.linspace(-1, 1, 500).view(5, 100)
packed = ops.quantize(x, 4, 64, seed=1)
mask, zero_rows = x > 0, ops.pack_bits(torch.arange(5) % 4 == 0)
SEED = torch.tensor([3])
ends = torch.ops.mesa_tune.quantize_ends(x.half(), *SIZES, True, SEED)

CALLS: dict[str, tuple[Any, ...]] = {
    "quantize": (x, *SIZES, True, SEED),
    "quantize nearest": (x, *SIZES, False, None),
    "quantize heads": (x.bfloat16(), 3, 5, 0, 4, True, SEED),
    "quantize_ends": (x.bfloat16(), *SIZES, True, SEED),
    "quantize_rows": (x.relu(), *SIZES[:3], True, SEED),
    "quantize_rows of 16 bits": (x.relu().bfloat16(), *SIZES[:3], True, SEED),
    "quantize_out": (x, *SIZES, True, SEED, packed.data.clone(), packed.ranges.clone()),
    "dequantize": (packed.data, packed.ranges, x.shape, torch.float16, *SIZES),
    "dequantize of ends": (*ends, x.shape, torch.float16, *SIZES),
    "dequantize with zero rows": (packed.data, packed.ranges, x.shape, torch.float16, *SIZES, zero_rows),
    "dequantize_out": (packed.data, packed.ranges, *SIZES, torch.empty(5, 100)),
    "pack_bits": (mask,),
    "unpack_bits": (ops.pack_bits(mask), (5, 100)),
    "pack_zero_rows": (x.view(25, 20).relu(),),
}


def test_no_key_of_rounding_noise_repeats() -> None:
    """Steps of an odd number visit all 2⁶⁴ keys."""
    assert ops.NOISE_STEP % 2 == 1


@pytest.mark.parametrize("call", CALLS)
def test_opcheck(call: str) -> None:
    op = getattr(torch.ops.mesa_tune, call.split(maxsplit=1)[0]).default
    assert set(torch.library.opcheck(op, CALLS[call]).values()) == {"SUCCESS"}


def roundtrip(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = ops.quantize(x, 4, 64, seed=seed)
    return q.data, ops.dequantize(q), ops.unpack_bits(ops.pack_bits(x > 0), x.shape)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_whole_graph_compiles(dynamic: bool) -> None:
    compiled = torch.compile(roundtrip, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 5):
        for got, expected in zip(compiled(x[:rows], SEED), roundtrip(x[:rows], SEED), strict=True):
            assert torch.equal(got, expected)


def test_compiled_code_without_a_seed_draws_anew() -> None:
    twice = lambda x: (ops.quantize(x, 4).data, ops.quantize(x, 4).data)  # noqa: E731
    compiled: Any = torch.compile(twice, fullgraph=True, backend="aot_eager")
    drawn = [*compiled(x), *compiled(x)]
    assert len({bytes(data.tolist()) for data in drawn}) == 4


def test_a_compiler_merges_equal_encodes_and_no_others() -> None:
    counts: list[int] = []

    def count(module: torch.fx.GraphModule, _: Any) -> Any:
        graph = fx_graph_cse(module.graph)
        counts.append(sum(node.target == torch.ops.mesa_tune.quantize.default for node in graph.nodes))
        return make_boxed_func(module.forward)

    def encode(x: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor, ...]:
        return tuple(ops.quantize(x, 4, seed=seed).data for seed in (one, one, two))

    torch.compile(encode, fullgraph=True, backend=aot_autograd(fw_compiler=count))(x, SEED, SEED + 1)
    assert counts == [2]


def test_fake_tensors_have_the_sizes_of_real_ones() -> None:
    with FakeTensorMode():
        fake = ops.quantize(torch.empty(5, 1001, dtype=torch.bfloat16), 3, 100, seed=1)
        decoded = ops.dequantize(fake)
        bits = ops.pack_bits(torch.empty(13, dtype=torch.bool))
    real = ops.quantize(torch.empty(5, 1001, dtype=torch.bfloat16), 3, 100, seed=1)
    assert (fake.data.shape, fake.ranges.shape) == (real.data.shape, real.ranges.shape)
    assert (decoded.shape, decoded.dtype, bits.shape) == ((5, 1001), torch.bfloat16, (2,))


@pytest.mark.parametrize("part", [{"data": torch.zeros(3, dtype=torch.uint8)}, {"ranges": torch.zeros(1, 2)}])
def test_packed_tensors_of_another_size_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError):
        ops.dequantize(packed._replace(**part))


@pytest.mark.parametrize("content", [None, b"no library"], ids=["missing", "broken"])
def test_a_library_that_does_not_load_is_told_with_the_remedy(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "_C.abi3.so"
    if content is not None:
        library.write_bytes(content)
    monkeypatch.setattr(ops, "LIBRARY", library)
    monkeypatch.setenv("MESA_TUNE_REFERENCE", "0")
    with pytest.warns(UserWarning, match="`mesa-tune doctor`") as caught:
        ops._load()
    assert [str(library) in str(warning.message) for warning in caught] == [True]
    monkeypatch.setenv("MESA_TUNE_REFERENCE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops._load()


UNLOADABLE = """
import sys, torch, warnings
load = torch.ops.load_library
torch.ops.load_library = lambda path: load(sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from mesa_tune import ops
    ops.dequantize(ops.quantize(torch.randn(10), 4))
print(sum("mesa-tune" in str(warning.message) for warning in caught), ops.native())
"""


@pytest.mark.slow("processes")
@pytest.mark.parametrize(("chosen", "warned"), [("1", 0), ("0", 1)], ids=["chosen", "not-loaded"])
def test_without_the_library_the_reference_runs(chosen: str, warned: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNLOADABLE, str(tmp_path / "_C.abi3.so")]
    environment = {**os.environ, "MESA_TUNE_REFERENCE": chosen}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(warned), "False"]
