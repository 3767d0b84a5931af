"""What Python of ours costs a call, in microseconds: eager mode, tensors so small that nothing else counts.

    python benchmarks/overhead.py [--calls 2000] [--rounds 9]

A block of calls in a plain module and the same in a converted one, in turn; processor time, so that other
programs count little. Routed calls go forward and backward, each on a tensor of its own. What is not Python
of ours is measured apart and taken off: one encode and one decode, and PyTorch's own cost of an
`autograd.Function` written in Python. `by hand`: the same count for such a Function of the very same ops,
written for this one function (by_hand.py); below 0 where PyTorch's own backward takes longer. Correctness
first: outputs must be bitwise the plain ones.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from by_hand import BY_HAND
from common import append, spread
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
    """One function, called on every item of a list."""

    target: Tensor

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.kernel = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.register_buffer("target", torch.arange(8))

    def forward(self, given: list[tuple[Tensor, ...]]) -> list[Tensor]:
        return [self.call(self, *some) for some in given]


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
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
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
    plain, converted = Calls(case.call), Calls(case.call)
    mt.convert(converted, mt.Policy.uniform(level=16), seed=0, min_elements=0)
    written = Calls(by_hand(name)) if name in BY_HAND else plain
    given = tensors(case, calls)
    for other in (converted, written):
        other.load_state_dict(plain.state_dict())
        if not all(map(torch.equal, outputs(plain, given), outputs(other, given))):
            raise SystemExit(f"{name}: the forward is not exact")
    taken = [once(plain, converted, written, case, calls) for _ in range(rounds + 2)][2:]
    added, hand, codec, function = zip(*taken, strict=True)
    return {
        "added_us": spread(list(added))._asdict(),
        "by_hand_us": statistics.median(hand),
        "codec_us": statistics.median(codec),
        "function_us": statistics.median(function),
    }


def outputs(module: Calls, given: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """The outputs, of the same random numbers each time."""
    torch.manual_seed(0)
    found: list[Tensor] = module(given)
    return found


def once(
    plain: Calls, converted: Calls, written: Calls, case: Case, calls: int
) -> tuple[float, float, float, float]:
    """Microseconds added to a call, by us and by hand, and, if anything is encoded, what is to be taken
    off.
    """
    before = run(plain, case, calls)
    added = 1e6 * (run(converted, case, calls) - before) / calls
    if not case.coded:
        return added, 0.0, 0.0, 0.0
    hand = 1e6 * (run(written, case, calls) - before) / calls
    one = Case(bare)
    function = 1e6 * (run(Calls(bare), one, calls) - run(Calls(view), one, calls)) / calls
    return added, hand, codec_us(case, calls), function


def view(module: Calls, x: Tensor) -> Tensor:
    return x.view_as(x)


def tensors(case: Case, count: int) -> list[tuple[Tensor, ...]]:
    """Outputs of another function, as a module meets them."""
    leaf = torch.randn(case.shape, requires_grad=True)
    return [tuple([leaf * 1.0 for _ in range(case.tensors)]) for _ in range(count)]


def run(module: Calls, case: Case, calls: int) -> float:
    """Seconds of processor time for all calls, forward and backward."""
    given = tensors(case, calls)
    gc.collect()
    gc.disable()
    start = time.process_time()
    found = module(given)
    if found[0] is not given[0][0]:
        torch.autograd.backward(found, [torch.ones_like(output) for output in found])
    used = time.process_time() - start
    gc.enable()
    return used


def codec_us(case: Case, calls: int) -> float:
    """Microseconds in which the tensors of a call are encoded and decoded, called straight."""
    x, key = torch.randn(case.shape), torch.zeros(1, dtype=torch.int64)
    quantize, dequantize = torch.ops.mesa_tune.quantize.default, torch.ops.mesa_tune.dequantize_out.default
    start = time.process_time()
    for _ in range(calls * case.coded):
        data, ranges = quantize(x, *SETTINGS, True, key)
        dequantize(data, ranges, *SETTINGS, x.new_empty(x.shape))
    return 1e6 * (time.process_time() - start) / calls


def describe(case: dict[str, Any]) -> str:
    """One function's figures in a line."""
    added = case["added_us"]
    off = case["codec_us"] + case["function_us"]
    line = (
        f"{case['function']:12} +{added['median']:5.1f} µs [{added['low']:.1f}, {added['high']:.1f}]: own"
        f" {added['median'] - off:.1f}, asked {ASKED[case['kind']]:.0f}"
    )
    if case["kind"] == "routed":
        line += (
            f"; by hand {case['by_hand_us'] - off:.1f}; taken off: codec {case['codec_us']:.1f},"
            f" autograd.Function {case['function_us']:.1f}"
        )
    return line


if __name__ == "__main__":
    main()
