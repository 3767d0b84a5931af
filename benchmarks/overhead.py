"""What Python of ours costs a call, in microseconds: eager mode, tensors so small that nothing else counts.

    python benchmarks/overhead.py [--calls 200] [--rounds 20] [function ...]

A block of calls in a plain module and the same in a converted one, in turn; processor time, and the least
of all rounds, since other programs can only add to it (the median of the differences is given beside it).
Routed calls go forward and backward, each on tensors of its own. What is not Python of ours is measured
apart and taken off: an encode and a decode of each tensor kept, and PyTorch's own cost of an
`autograd.Function` written in Python. `by hand`: the same count for such a Function of the very same ops,
written for this one function (by_hand.py); below 0 where PyTorch's own backward takes longer. Correctness
first: outputs must be bitwise the plain ones.
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


class Case(NamedTuple):
    """`call(module, *tensors)` of so many `tensors` of this `shape`, which encodes `coded` of them."""

    call: Call
    shape: tuple[int, ...] = (8, WIDTH)
    tensors: int = 1
    coded: int = 1


class Calls(nn.Module):
    """One function, called on the tensors of lists, in turn."""

    target: Tensor

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.kernel = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.register_buffer("target", torch.arange(8))

    def forward(self, *given: list[Tensor]) -> list[Tensor]:
        return [self.call(self, *some) for some in zip(*given, strict=True)]


class Bare(torch.autograd.Function):
    """What every function written in Python costs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.saved_tensors  # noqa: B018
        return grad, None, None


def bare(module: Calls, x: Tensor) -> Tensor:
    applied: Tensor = Bare.apply(x, module.weight, module.scale)
    return applied


def by_hand(name: str) -> Call:
    """The function written by hand."""
    apply, more = BY_HAND[name]
    return lambda module, *some: apply(*some, *[getattr(module, each) for each in more])


def batch_norm(module: Calls, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, module.scale, module.shift, training=True)


def attention(module: Calls, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def shape(module: Calls, x: Tensor) -> Tensor:
    x.shape  # noqa: B018
    return x


ROUTED: dict[str, Case] = {
    "linear": Case(lambda module, x: F.linear(x, module.weight, module.scale)),
    "layer_norm": Case(lambda module, x: F.layer_norm(x, (WIDTH,), module.scale, module.shift)),
    "gelu": Case(lambda _, x: F.gelu(x)),
    "relu": Case(lambda _, x: F.relu(x)),
    "tanh": Case(lambda _, x: torch.tanh(x)),
    "dropout": Case(lambda _, x: F.dropout(x, 0.1)),
    "mul": Case(lambda module, x: torch.mul(x, module.scale)),
    "matmul": Case(lambda module, x: torch.matmul(x, module.weight)),
    "bmm": Case(lambda _, a, b: torch.bmm(a, b), (2, 8, 8), 2, 2),
    "softmax": Case(lambda _, x: F.softmax(x, -1)),
    "batch_norm": Case(batch_norm),
    "conv2d": Case(lambda module, x: F.conv2d(x, module.kernel, None, 1, 1), (2, 4, 4, 4)),
    "attention": Case(attention, (1, 2, 8, 8), 3, 3),
    "log_softmax": Case(lambda _, x: F.log_softmax(x, -1)),
    "cross_entropy": Case(lambda module, x: F.cross_entropy(x, module.target)),
}
NOT_ROUTED: dict[str, Case] = {
    "add": Case(lambda _, x: torch.add(x, x), coded=0),
    "shape": Case(shape, coded=0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--calls", type=int, default=200, help="a forward; a ResNet-50 makes 158, a DeiT-Ti 148"
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


def measure(name: str, case: Case, calls: int, rounds: int) -> dict[str, Any]:
    """Microseconds that a converted module adds to each call, and what of them is not ours."""
    plain, converted, written = (Calls(case.call) for _ in range(3))
    mt.convert(converted, mt.Policy.uniform(level=16), seed=0, min_elements=0)
    if case.coded:
        written.call = by_hand(name)
    for other in (converted, written):
        other.load_state_dict(plain.state_dict())
        check(name, plain, other, tensors(case, calls))
    one = Case(bare)
    kinds: dict[str, Callable[[], float]] = {
        "plain": lambda: run(plain, case, calls),
        "converted": lambda: run(converted, case, calls),
        "by hand": lambda: run(written, case, calls),
        "codec": lambda: code(case, calls),
        "function": lambda: run(Calls(bare), one, calls),
        "view": lambda: run(Calls(view), one, calls),
    }
    rows = [[1e6 * kind() / calls for kind in kinds.values()] for _ in range(rounds + 2)]
    taken = dict(zip(kinds, zip(*rows[2:], strict=True), strict=True))  # two calls are served anew
    plain_us, added_us, hand_us, codec_us, function_us, view_us = map(min, taken.values())
    median = statistics.median(map(operator.sub, taken["converted"], taken["plain"]))
    measured = {
        "added_us": added_us - plain_us,
        "median_us": median,
        "codec_us": codec_us,
        "function_us": 0.0,
    }
    if case.coded:
        measured |= {"by_hand_us": hand_us - plain_us, "function_us": function_us - view_us}
    return measured


def check(name: str, plain: Calls, other: Calls, given: list[list[Tensor]]) -> None:
    """The outputs must be the same, of the same random numbers."""
    torch.manual_seed(0)
    expected = plain(*given)
    torch.manual_seed(0)
    if not all(map(torch.equal, expected, other(*given))):
        raise SystemExit(f"{name}: the forward is not exact")


def view(module: Calls, x: Tensor) -> Tensor:
    return x.view_as(x)


def tensors(case: Case, count: int) -> list[list[Tensor]]:
    """Outputs of another function, as a module meets them; a list for each tensor of a call."""
    leaf = torch.randn(case.shape, requires_grad=True)
    return [[leaf * 1.0 for _ in range(count)] for _ in range(case.tensors)]


def run(module: Calls, case: Case, calls: int) -> float:
    """Seconds of processor time for all calls, forward and backward."""
    given = tensors(case, calls)
    gc.collect()
    gc.disable()
    start = time.process_time()
    found = module(*given)
    if found[0] is not given[0][0]:
        torch.autograd.backward(found, [torch.ones_like(output) for output in found])
    used = time.process_time() - start
    gc.enable()
    return used


def code(case: Case, calls: int) -> float:
    """Seconds in which the tensors of all calls are encoded and decoded, called straight."""
    x, key = torch.randn(case.shape), torch.zeros(1, dtype=torch.int64)
    quantize, dequantize = torch.ops.mesa_tune.quantize.default, torch.ops.mesa_tune.dequantize_out.default
    start = time.process_time()
    for _ in range(calls * case.coded):
        data, ranges = quantize(x, *SETTINGS, True, key)
        dequantize(data, ranges, *SETTINGS, x.new_empty(x.shape))
    return time.process_time() - start


def describe(case: dict[str, Any]) -> str:
    """One function's figures in a line."""
    off = case["codec_us"] + case["function_us"]
    line = (
        f"{case['function']:14}+{case['added_us']:6.1f} µs (median {case['median_us']:.1f}):"
        f" own {case['added_us'] - off:5.1f}, asked {ASKED[case['kind']]:.0f}"
    )
    if case["kind"] == "routed":
        line += (
            f"; by hand {case['by_hand_us'] - off:5.1f}; taken off: codec {case['codec_us']:.1f},"
            f" autograd.Function {case['function_us']:.1f}"
        )
    return line


if __name__ == "__main__":
    main()
