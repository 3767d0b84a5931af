"""Same seed, same bits: whatever the number of threads and the vector path, and as the reference has them.

The inputs are made of integers: torch's own random numbers depend on the instruction set.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import mesa_tune.ops.fused  # noqa: F401 (registers its ops)
from mesa_tune import ops
from mesa_tune.ops.codecs import RAW

NUMEL = 8 * 15 * 23 * 87  # more than seven portions of a thread
SHAPE = (8, 15, 23, 87)
THREADS = (1, 2, 7)
SEED = torch.tensor([5])
WIDTHS = {(256, 0): range(1, 9), (100, 0): (1, 8), (33_000, 0): (2, 5), (1, 5): (4, 7)}
"""Bits for each kind of groups: (group_size, quant_groups)."""
OWN_ORDER = ("norm_backward", "batch_norm_backward", "softmax_backward", "cross_entropy_backward")
"""Ops whose kernels make sums in an order that is not the reference's, but always the same."""


def digests() -> dict[str, str]:
    """A hash of what each op makes, over all dtypes, widths and kinds of groups."""
    found: dict[str, str] = {}
    for dtype in ops.DTYPES:
        x = ((torch.arange(NUMEL) * 7919 % 10007 - 5000) / 1234).to(dtype).view(SHAPE)
        x[0, 0, 0, 0], x[3, 7] = torch.inf, 2.5
        for name, made in results(x):
            seen = hashlib.blake2b(found.get(name, "").encode())
            # NaN is NaN, whatever its payload.
            seen.update(made.nan_to_num(7.0).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            found[name] = seen.hexdigest()
    return found


def results(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    for kind, widths in WIDTHS.items():
        for bits in widths:
            yield from quantized(x, bits, kind)
        yield "extents", RAW.extents(x, *kind)
    yield "pack_bits", (packed := ops.pack_bits(x > 0))
    yield "unpack_bits", ops.unpack_bits(packed, x.shape)
    bitmap, survivors = RAW.sparsify(x, NUMEL // 3)
    yield "sparsify", bitmap
    yield "sparsify", survivors
    yield "densify", RAW.densify(bitmap, survivors, x.shape)
    windows = [23, 12, 3, 1, 2, 1, 87, 44, 3, 1, 2, 1]  # of a max pool, as `ops.reference.windows` has them
    _, indices = torch.nn.functional.max_pool2d(x.float(), 3, 2, 1, return_indices=True)
    yield "pack_windows", (packed := RAW.pack_windows(indices, windows))
    yield "unpack_windows", RAW.unpack_windows(packed, windows, indices.shape)
    yield from normalized(x)
    for group_size, groups in ((256, 0), (1, 5)):
        parts = RAW.quantize_samples(x, 3, group_size, groups, True, SEED, None)
        for part in parts:
            yield "quantize_samples", part
        yield "dequantize_samples", RAW.dequantize_samples(*parts, x.shape, x.dtype, group_size, groups)


def normalized(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    grad = x.float().nan_to_num(1.0, 1.0).view(-1, 87)
    data, ranges = torch.ops.mesa_tune.quantize(grad, 4, 16, 256, 0, True, SEED)
    rest = (grad[:, :1].contiguous(), grad[0].contiguous(), True, 2.0, 4, 16, 256)
    for upward in (grad, grad.bfloat16(), grad.half()):
        for made in torch.ops.mesa_tune.norm_backward(data, ranges, upward, *rest):
            yield "norm_backward", made
    weight, sizes = grad[0], (4, 16, 256)
    for last, shape in ((True, grad.shape), (False, SHAPE)):
        channels = [each[: shape[1]].contiguous() for each in (grad[1], weight)]
        given = (data, ranges, grad.view(shape), *channels, last, False, *sizes)
        for made in torch.ops.mesa_tune.batch_norm_backward(*given):
            yield "batch_norm_backward", made
    yield "softmax_backward", torch.ops.mesa_tune.softmax_backward(data, ranges, grad, *sizes)
    given = (torch.arange(len(grad)) % 87, grad[:, 2].contiguous(), weight.abs(), grad[:, 1], 87, 5, True)
    yield "cross_entropy_backward", torch.ops.mesa_tune.cross_entropy_backward(data, ranges, *given, *sizes)


def quantized(x: Tensor, bits: int, kind: tuple[int, int]) -> Iterator[tuple[str, Tensor]]:
    sizes, stochastic = (bits, 1 << bits, *kind), bits != 3
    data, ranges = torch.ops.mesa_tune.quantize(x, *sizes, stochastic, SEED)
    yield "quantize", data
    yield "quantize", ranges
    yield "dequantize", torch.ops.mesa_tune.dequantize(data, ranges, x.shape, x.dtype, *sizes)
    yield "quantize_within", RAW.quantize_within(x, ranges * 0.75, *sizes, stochastic, SEED)


def with_threads(threads: tuple[int, ...]) -> list[dict[str, str]]:
    found = []
    for count in threads:
        torch.set_num_threads(count)
        found.append(digests())
    return found


def child(**environment: str) -> subprocess.Popen[str]:
    threads = (1,) if "MESA_TUNE_REFERENCE" in environment else THREADS
    code = f"import tests.ops.test_same_bits as t, json; print(json.dumps(t.with_threads({threads})))"
    # Threads that wait must not take the processor from those that work.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", **environment}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


PATHS = ("default", "avx2", "avx512")
"""A processor has those up to its own."""


@pytest.mark.slow("processes")
def test_threads_vector_paths_and_reference_agree() -> None:
    here = torch.backends.cpu.get_cpu_capability().lower()
    paths = {
        "reference": child(MESA_TUNE_REFERENCE="1"),
        **{path: child(ATEN_CPU_CAPABILITY=path) for path in PATHS[: PATHS.index(here) + 1]},
    }
    found = {name: json.loads(process.communicate()[0]) for name, process in paths.items()}
    (expected,) = found["reference"]
    assert ops.native()
    for op in OWN_ORDER:
        assert found["default"][0][op] != expected[op]
        expected[op] = found["default"][0][op]
    for name in paths.keys() - {"reference"}:
        for run in found[name]:
            assert {op for op in expected if run[op] != expected[op]} == set(), name
