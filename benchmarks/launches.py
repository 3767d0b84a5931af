"""How many operators that compute does a training step dispatch, plain and converted?

    python benchmarks/launches.py [--batch 2] [--level 16] [--where]
    python benchmarks/launches.py --batch 16 --rounds 15    # also times whole steps in turn
    python benchmarks/launches.py --batch 16 --seeds 5      # also saved bytes, and errors of gradients

DeiT-Ti in fp32, under autocast to bf16, and in bf16 alone; forward and backward apart, in the second step,
because the first one plans the calls. On a GPU each such operator is a launch of a kernel at least; views and
allocations are none. Converted, a stored tensor may cost one more in the forward, which encodes it, and one
more in the backward, which decodes it. Attention's second forward is counted apart. No GPU is needed.
`--where` lists the operators of which the converted step has more. Saved bytes: of the storages that are made
in the forward and alive after it, over plain's. The error of a gradient is ‖ĝ − g‖² / ‖g‖² over all
parameters, with g of the plain model in the same dtype; mean over rounding seeds.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import append, in_turn, ratios
from meters import CreatedStorages, given_tensors, loss_under
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import mesa_tune as mt

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "deit_tiny.py"
DTYPES = ("fp32", "autocast", "bf16")
NO_KERNELS = ("empty", "new_empty", "_local_scalar_dense", "resize_", "set_", "_unsafe_view")
ENCODING = ("quantize", "quantize_ends", "quantize_map", "quantize_rows")


class Operators(TorchDispatchMode):
    """Counts the operators that compute, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        is_view = any(
            each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns
        )
        if not is_view and not name.startswith(NO_KERNELS):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Training:
    """DeiT-Ti in one of `DTYPES`, converted by `policy`; None: plain."""

    def __init__(self, dtype: str, batch_size: int, policy: mt.Policy | None) -> None:
        self.work = mt.Workload.load(EXAMPLE, batch_size=batch_size, device="cpu")
        self.model, self.batch = self.work.build(), self.work.make_batch()
        if dtype == "bf16":
            self.model = self.model.bfloat16()
            self.batch = tree_map_only(Tensor, _in_bf16, self.batch)
        if policy is not None:
            mt.convert(self.model, policy, seed=0)
        self.casts, self.loss_of = dtype == "autocast", loss_under(self.work, policy)
        self.optimizer = self.work.make_optimizer(self.model)

    def loss(self) -> Tensor:
        """Run the forward."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):
            return self.loss_of(self.model, self.batch)

    def step(self) -> None:
        """Take a whole step."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def saved_bytes(self) -> int:
        """Return the bytes of the storages that are made in the forward and alive after it."""
        with CreatedStorages(given_tensors(self.model, self.batch)) as created:
            loss = self.loss()
            return created.alive([loss]).bytes

    def gradient(self) -> Tensor:
        """Return the gradient of all parameters, in float64."""
        self.model.zero_grad()
        self.loss().backward()
        return torch.cat([p.grad.double().flatten() for p in self.model.parameters() if p.grad is not None])

    def operators(self) -> tuple[Counter[str], Counter[str]]:
        """Return the operators of forward and backward of the second step."""
        self.loss().backward()
        self.model.zero_grad()
        with Operators() as forward:
            loss = self.loss()
        with Operators() as backward:
            loss.backward()
        return forward.counts, backward.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--level", type=int, default=16, help="of every layer")
    parser.add_argument("--rounds", type=int, default=0, help="time so many steps of each kind in turn")
    parser.add_argument("--seeds", type=int, default=0, help="measure errors of so many roundings")
    parser.add_argument("--where", action="store_true", help="list operators of which there are more")
    arguments = parser.parse_args()
    policy = mt.Policy.uniform(level=arguments.level)
    for dtype in DTYPES:
        both = Training(dtype, arguments.batch, None), Training(dtype, arguments.batch, policy)
        plain, converted = (training.operators() for training in both)
        row = summary(plain, converted)
        text = (
            f"{dtype:9} forward {row['forward'][0]} -> {row['forward'][1]}, backward {row['backward'][0]} -> "
            f"{row['backward'][1]}; {row['stored']} stored tensors, {row['second']} second forwards: "
            f"{row['per_forward']:+.2f} and {row['per_backward']:+.2f} per stored tensor"
        )
        if arguments.rounds:
            times = in_turn({"plain": both[0].step, "converted": both[1].step}, arguments.rounds)
            ratio = ratios(times["plain"], times["converted"])
            row["step"] = ratio._asdict()
            text += f"; step {ratio.median:.3f} times ({ratio.low:.3f} to {ratio.high:.3f})"
        if arguments.seeds:
            row |= accuracy(*both, policy, arguments.seeds)
            text += f"; saves {row['saved']:.1%}, gradient error {row['error']:.2g}"
        append("launches", {"model": "deit_ti", "dtype": dtype, "batch": arguments.batch, **row})
        print(text, flush=True)
        for phase, before, after in zip(("forward", "backward"), plain, converted, strict=True):
            changed = [(after[name] - before[name], name) for name in before | after]
            for count, name in sorted(changed, reverse=True) if arguments.where else ():
                if count:
                    print(f"    {phase}: {count:+d} {name} ({before[name]} -> {after[name]})")


def accuracy(plain: Training, converted: Training, policy: mt.Policy, seeds: int) -> dict[str, float]:
    """Return the saved bytes over plain's, and the mean error of the gradient."""
    saved = converted.saved_bytes() / plain.saved_bytes()
    converted.model.load_state_dict(plain.model.state_dict())
    right, errors = plain.gradient(), []
    for seed in range(seeds):
        converted.loss_of = loss_under(converted.work, policy, seed)
        mt.convert(converted.model, policy, seed=seed)
        errors.append(float((converted.gradient() - right).square().sum() / right.square().sum()))
    return {"saved": saved, "error": fmean(errors)}


def summary(plain: Sequence[Counter[str]], converted: Sequence[Counter[str]]) -> dict[str, Any]:
    """Return counts, plain and converted, and what each stored tensor adds to either."""
    forward, backward = ([plain[phase].total(), converted[phase].total()] for phase in (0, 1))
    stored = sum(converted[0][name] for name in ENCODING)
    attention = {name: count for name, count in converted[1].items() if name.startswith("_scaled_dot")}
    second = sum(count for name, count in attention.items() if "backward" not in name)
    return {
        "forward": forward,
        "backward": backward,
        "stored": stored,
        "second": second,
        "per_forward": (forward[1] - forward[0]) / stored,
        "per_backward": (backward[1] - second - backward[0]) / stored,
    }


def _in_bf16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


if __name__ == "__main__":
    main()
