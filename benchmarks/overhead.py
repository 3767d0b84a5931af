"""How many microseconds does mesa-tune's Python code add to one call, in eager mode, on very small tensors?

    python benchmarks/overhead.py [--calls 200] [--rounds 20] [function ...]

Each round runs the same calls in a plain module and in a converted one. The result is the processor time of
the fastest round, since other programs can only add time; the median of the differences is printed, too.
Routed calls run forward and backward, each on its own tensors. Two costs are measured separately and
subtracted: encoding and decoding the saved tensors, and PyTorch's overhead of an `autograd.Function` in
Python. `by hand` is the same measurement for an `autograd.Function` written for this one function with the
same ops (by_hand.py); it is negative where PyTorch's own backward is slower. Before timing, outputs must be
bitwise the plain ones.
"""

from __future__ import annotations

import argparse
import gc
import operator
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from by_hand import BY_HAND
from common import append
from torch import Tensor, nn

import mesa_tune as mt

WIDTH = 16
ASKED = {"routed": 25.0, "not routed": 4.0}
SETTINGS = (4, 16, 256, 0)


Call = Callable[..., Tensor]


class FunctionCase(NamedTuple):
    """A call `call(module, *tensors)` with `tensors` tensors of `shape`, of which it encodes `coded`."""

    call: Call
    shape: tuple[int, ...] = (8, WIDTH)
    tensors: int = 1
    coded: int = 1


class Calls(nn.Module):
    """Module that calls one function once per element of the given lists of tensors."""

    target: Tensor

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.kernel = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.register_buffer("target", torch.arange(8))

    def forward(self, *lists: list[Tensor]) -> list[Tensor]:
        return [self.call(self, *tensors) for tensors in zip(*lists, strict=True)]


class Identity(torch.autograd.Function):
    """A function that does nothing: its time is the overhead of every `autograd.Function` in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.saved_tensors  # noqa: B018
        return grad, None, None


def identity(module: Calls, x: Tensor) -> Tensor:
    applied: Tensor = Identity.apply(x, module.weight, module.scale)
    return applied


def by_hand(name: str) -> Call:
    """Return the function written by hand, as a call of a `Calls` module."""
    apply, attributes = BY_HAND[name]
    return lambda module, *tensors: apply(*tensors, *[getattr(module, name) for name in attributes])


def batch_norm(module: Calls, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, module.scale, module.shift, training=True)


def attention(module: Calls, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def shape(module: Calls, x: Tensor) -> Tensor:
    x.shape  # noqa: B018
    return x


ROUTED: dict[str, FunctionCase] = {
    "linear": FunctionCase(lambda module, x: F.linear(x, module.weight, module.scale)),
    "layer_norm": FunctionCase(lambda module, x: F.layer_norm(x, (WIDTH,), module.scale, module.shift)),
    "gelu": FunctionCase(lambda _, x: F.gelu(x)),
    "relu": FunctionCase(lambda _, x: F.relu(x)),
    "tanh": FunctionCase(lambda _, x: torch.tanh(x)),
    "dropout": FunctionCase(lambda _, x: F.dropout(x, 0.1)),
    "mul": FunctionCase(lambda module, x: torch.mul(x, module.scale)),
    "matmul": FunctionCase(lambda module, x: torch.matmul(x, module.weight)),
    "bmm": FunctionCase(lambda _, a, b: torch.bmm(a, b), (2, 8, 8), 2, 2),
    "softmax": FunctionCase(lambda _, x: F.softmax(x, -1)),
    "batch_norm": FunctionCase(batch_norm),
    "conv2d": FunctionCase(lambda module, x: F.conv2d(x, module.kernel, None, 1, 1), (2, 4, 4, 4)),
    "attention": FunctionCase(attention, (1, 2, 8, 8), 3, 3),
    "log_softmax": FunctionCase(lambda _, x: F.log_softmax(x, -1)),
    "cross_entropy": FunctionCase(lambda module, x: F.cross_entropy(x, module.target)),
}
NOT_ROUTED: dict[str, FunctionCase] = {
    "add": FunctionCase(lambda _, x: torch.add(x, x), coded=0),
    "shape": FunctionCase(shape, coded=0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--calls", type=int, default=200, help="calls per forward; ResNet-50 has 158, DeiT-Ti 148"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("functions", nargs="*", help="which to measure (default: all)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for kind, group in (("routed", ROUTED), ("not routed", NOT_ROUTED)):
        for name, case in group.items():
            if arguments.functions and name not in arguments.functions:
                continue
            measured = measure(name, case, arguments.calls, arguments.rounds)
            cases.append({"function": name, "kind": kind, **measured})
            print(describe(cases[-1]), flush=True)
    print(f"appended to {append('overhead', {'subject': 'Python a call', 'cases': cases})}")


def measure(name: str, case: FunctionCase, calls: int, rounds: int) -> dict[str, Any]:
    """Return the microseconds that a converted module adds to each call, and the costs to subtract."""
    plain, converted, written = (Calls(case.call) for _ in range(3))
    mt.convert(converted, mt.Policy.uniform(level=16), seed=0, min_elements=0)
    if case.coded:
        written.call = by_hand(name)
    for module in (converted, written):
        module.load_state_dict(plain.state_dict())
        check(name, plain, module, make_tensors(case, calls))
    one = FunctionCase(identity)
    kinds: dict[str, Callable[[], float]] = {
        "plain": lambda: run(plain, case, calls),
        "converted": lambda: run(converted, case, calls),
        "by hand": lambda: run(written, case, calls),
        "codec": lambda: encode_and_decode(case, calls),
        "function": lambda: run(Calls(identity), one, calls),
        "view": lambda: run(Calls(view), one, calls),
    }
    rows = [[1e6 * kind() / calls for kind in kinds.values()] for _ in range(rounds + 2)]
    times = dict(zip(kinds, zip(*rows[2:], strict=True), strict=True))  # the first two rounds fill caches
    plain_us, added_us, hand_us, codec_us, function_us, view_us = map(min, times.values())
    median = statistics.median(map(operator.sub, times["converted"], times["plain"]))
    measured = {
        "added_us": added_us - plain_us,
        "median_us": median,
        "codec_us": codec_us,
        "function_us": 0.0,
    }
    if case.coded:
        measured |= {"by_hand_us": hand_us - plain_us, "function_us": function_us - view_us}
    return measured


def check(name: str, plain: Calls, module: Calls, inputs: list[list[Tensor]]) -> None:
    """Exit unless both modules give the same outputs with the same random numbers."""
    torch.manual_seed(0)
    expected = plain(*inputs)
    torch.manual_seed(0)
    if not all(map(torch.equal, expected, module(*inputs))):
        raise SystemExit(f"{name}: the forward is not exact")


def view(module: Calls, x: Tensor) -> Tensor:
    return x.view_as(x)


def make_tensors(case: FunctionCase, count: int) -> list[list[Tensor]]:
    """Return one list per tensor of a call; the tensors are outputs of another function, as in a model."""
    leaf = torch.randn(case.shape, requires_grad=True)
    return [[leaf * 1.0 for _ in range(count)] for _ in range(case.tensors)]


def run(module: Calls, case: FunctionCase, calls: int) -> float:
    """Return the seconds of processor time for all calls, forward and backward."""
    inputs = make_tensors(case, calls)
    gc.collect()
    gc.disable()
    start = time.process_time()
    outputs = module(*inputs)
    if outputs[0] is not inputs[0][0]:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    seconds = time.process_time() - start
    gc.enable()
    return seconds


def encode_and_decode(case: FunctionCase, calls: int) -> float:
    """Return the seconds of processor time to encode and decode the tensors of all calls."""
    x, key = torch.randn(case.shape), torch.zeros(1, dtype=torch.int64)
    quantize, dequantize = torch.ops.mesa_tune.quantize.default, torch.ops.mesa_tune.dequantize_out.default
    start = time.process_time()
    for _ in range(calls * case.coded):
        data, ranges = quantize(x, *SETTINGS, True, key)
        dequantize(data, ranges, *SETTINGS, x.new_empty(x.shape))
    return time.process_time() - start


def describe(case: dict[str, Any]) -> str:
    """Return one function's figures as a line."""
    subtracted = case["codec_us"] + case["function_us"]
    line = (
        f"{case['function']:14}+{case['added_us']:6.1f} µs (median {case['median_us']:.1f}):"
        f" own {case['added_us'] - subtracted:5.1f}, asked {ASKED[case['kind']]:.0f}"
    )
    if case["kind"] == "routed":
        line += (
            f"; by hand {case['by_hand_us'] - subtracted:5.1f}; subtracted: codec {case['codec_us']:.1f},"
            f" autograd.Function {case['function_us']:.1f}"
        )
    return line


if __name__ == "__main__":
    main()
