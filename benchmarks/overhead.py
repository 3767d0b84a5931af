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
from typing import Any

import torch
import torch.nn.functional as F
from by_hand import BY_HAND
from common import append, spread
from torch import Tensor, nn

import mesa_tune as mt

WIDTH = 16
ASKED = {"routed": 25.0, "not routed": 4.0}
SETTINGS = (4, 16, 256, 0)


class Calls(nn.Module):
    """One function, called on every tensor of a list."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, given: list[Tensor]) -> list[Tensor]:
        return [self.call(self, x) for x in given]


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


def written(name: str) -> Callable[[Calls, Tensor], Tensor]:
    """The function written by hand."""
    apply, parameters = BY_HAND[name]
    return lambda module, x: apply(x, *[getattr(module, parameter) for parameter in parameters])


def view(module: Calls, x: Tensor) -> Tensor:
    return x.view_as(x)


def linear(module: Calls, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.scale)


def layer_norm(module: Calls, x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), module.scale, module.shift)


def gelu(module: Calls, x: Tensor) -> Tensor:
    return F.gelu(x)


def relu(module: Calls, x: Tensor) -> Tensor:
    return F.relu(x)


def mul(module: Calls, x: Tensor) -> Tensor:
    return torch.mul(x, module.scale)


def matmul(module: Calls, x: Tensor) -> Tensor:
    return torch.matmul(x, module.weight)


def softmax(module: Calls, x: Tensor) -> Tensor:
    return F.softmax(x, -1)


def batch_norm(module: Calls, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, module.scale, module.shift, training=True)


def add(module: Calls, x: Tensor) -> Tensor:
    return torch.add(x, x)


def shape(module: Calls, x: Tensor) -> Tensor:
    x.shape  # noqa: B018
    return x


ROUTED: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    "layer_norm": layer_norm,
    "gelu": gelu,
    "relu": relu,
    "mul": mul,
    "matmul": matmul,
    "softmax": softmax,
    "batch_norm": batch_norm,
}
NOT_ROUTED: dict[str, Callable[..., Tensor]] = {"add": add, "shape": shape}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for kind, group in (("routed", ROUTED), ("not routed", NOT_ROUTED)):
        for name, call in group.items():
            cases.append({"function": name, "kind": kind, **measure(call, arguments.calls, arguments.rounds)})
            print(describe(cases[-1]), flush=True)
    print(f"appended to {append('overhead', {'subject': 'Python a call', 'cases': cases})}")


def measure(call: Callable[..., Tensor], calls: int, rounds: int) -> dict[str, Any]:
    """Microseconds that a converted module adds to each call, and what of them is not ours."""
    routed = call in ROUTED.values()
    plain, converted, by_hand = Calls(call), Calls(call), Calls(written(call.__name__) if routed else call)
    mt.convert(converted, mt.Policy.uniform(level=16), seed=0, min_elements=0)
    given = tensors(calls)
    for other in (converted, by_hand):
        other.load_state_dict(plain.state_dict())
        if not all(torch.equal(one, two) for one, two in zip(plain(given), other(given), strict=True)):
            raise SystemExit(f"{call.__name__}: the forward is not exact")
    taken = [once(plain, converted, by_hand, calls, routed) for _ in range(rounds + 2)][2:]
    added, hand, codec, function = zip(*taken, strict=True)
    return {
        "added_us": spread(list(added))._asdict(),
        "by_hand_us": statistics.median(hand),
        "codec_us": statistics.median(codec),
        "function_us": statistics.median(function),
    }


def once(
    plain: Calls, converted: Calls, by_hand: Calls, calls: int, routed: bool
) -> tuple[float, float, float, float]:
    """Microseconds added to a call, by us and by hand, and, if it is `routed`, what is to be taken off."""
    before = run(plain, calls)
    added = 1e6 * (run(converted, calls) - before) / calls
    if not routed:
        return added, 0.0, 0.0, 0.0
    hand = 1e6 * (run(by_hand, calls) - before) / calls
    function = 1e6 * (run(Calls(bare), calls) - run(Calls(view), calls)) / calls
    return added, hand, codec_us(calls), function


def tensors(count: int) -> list[Tensor]:
    """Outputs of another function, as a module meets them."""
    leaf = torch.randn(8, WIDTH, requires_grad=True)
    return [leaf * 1.0 for _ in range(count)]


def run(module: Calls, calls: int) -> float:
    """Seconds of processor time for all calls, forward and backward."""
    given = tensors(calls)
    gc.collect()
    gc.disable()
    start = time.process_time()
    outputs = module(given)
    if outputs[0] is not given[0]:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    used = time.process_time() - start
    gc.enable()
    return used


def codec_us(calls: int) -> float:
    """Microseconds of one encode and one decode, called straight."""
    x, key = torch.randn(8, WIDTH), torch.zeros(1, dtype=torch.int64)
    quantize, dequantize = torch.ops.mesa_tune.quantize.default, torch.ops.mesa_tune.dequantize_out.default
    start = time.process_time()
    for _ in range(calls):
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
