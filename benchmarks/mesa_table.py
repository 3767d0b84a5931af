"""Training memory of Mesa's five models at batch size 128 in mixed precision, beside what Mesa published.

    python benchmarks/mesa_table.py [--models deit_ti] [--run DIR]
    python benchmarks/mesa_table.py --docs          # writes docs/mesa.md from the latest results

Each model is profiled at a small batch size under bf16 autocast, and the peak of a whole training step with
AdamW is predicted at 128: plain, at 256 and 16 levels, and under the searched policy with the least peak
whose predicted gradient error is at most that of 256 levels everywhere. The baseline is today's fused
attention, and the one of Mesa's days, in which products and softmax of attention are calls of their own. A
check measures plain and 16 levels at another batch size than the profiled one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from common import RESULTS, append, json_lines
from torch import Tensor, nn
from transformers import PreTrainedModel
from zoo import ZOO, configured

import mesa_tune as mt
from mesa_tune.errors import BudgetError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "mesa.md"
BATCH, PROFILED, CHECKED = 128, 4, 6
OPTIONS = [mt.LayerSettings(level=level) for level in (4, 8, 16, 64, 256)]
PUBLISHED = {
    "deit_ti": (4171, 1858),
    "deit_s": (8459, 3840),
    "deit_b": (17691, 8616),
    "swin_t": (11812, 5371),
    "pvt_t": (7800, 3782),
}
"""Training memory in MB that Mesa's paper reports (arXiv 2111.11124), plain and with Mesa, in 8 bits."""
TITLES = {
    "deit_ti": "DeiT-Ti",
    "deit_s": "DeiT-S",
    "deit_b": "DeiT-B",
    "swin_t": "Swin-Ti",
    "pvt_t": "PVT-Ti",
}
_DEITS = {
    "deit_ti": {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768},
    "deit_s": {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
    "deit_b": {},
}
HEAD = """\
# Mesa's models

`python benchmarks/mesa_table.py` predicts it; `python benchmarks/mesa_table.py --docs` writes this page.

Peak of a whole training step (weights, gradients, AdamW's state, batch, saved and working memory) at batch
size 128, in MB = 10⁶ bytes, bf16 autocast, 224 × 224, random weights. The steps were traced at 2 and 4
samples on a CPU, whose kernels save the same as a GPU's but for attention's and dropout's own small tensors.
**searched**: least peak with a predicted gradient error of at most that of 256 levels.
**published**: what Mesa's paper reports for its 8 bits on a GPU (arXiv 2111.11124), beside its own baseline.
"""


def workload(name: str, batch_size: int, attention: str) -> mt.Workload:
    """Return a model with one implementation of attention (`sdpa` or `eager`) as a workload."""

    def build() -> nn.Module:
        if name in _DEITS:
            values = {**_DEITS[name], "num_labels": 1000}
            model = configured("DeiTConfig", "DeiTForImageClassification", values, {})("published", None)
        else:
            model = ZOO[name].build("published", None)
        if isinstance(model, PreTrainedModel):
            model.set_attn_implementation(attention)
        return model

    return mt.Workload(
        build,
        partial(ZOO["deit_s"].batch, "published"),
        _loss,
        batch_size=batch_size,
        device="cpu",
        autocast="bfloat16",
    )


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"])


def measure(name: str, run: Path) -> dict[str, Any]:
    """Return the predicted peaks of one model, and the check."""
    run.mkdir(parents=True, exist_ok=True)
    chosen = workload(name, PROFILED, "sdpa")
    profile = mt.profile(chosen, options=OPTIONS, seeds=1, path=run / f"{name}.json", progress=True)
    eager = mt.profile(workload(name, PROFILED, "eager"), options=[])
    policies = {
        "plain": mt.Policy.parse(""),
        "256": mt.Policy.uniform(level=256),
        "16": mt.Policy.uniform(level=16),
    }
    plan = smallest(profile, profile.predict(policies["256"]).gradient_error or 0.0)
    peaks = {label: _peak(profile, policy) for label, policy in policies.items()}
    return {
        "subject": name,
        "peaks": {**peaks, "searched": plan.predicted.peak_bytes},
        "eager": {label: _peak(eager, policy) for label, policy in policies.items()},
        "errors": {
            **{label: profile.predict(policy).gradient_error for label, policy in policies.items()},
            "searched": plan.predicted.gradient_error,
        },
        "check": {label: _check(name, profile, policies[label]) for label in ("plain", "16")},
    }


def _peak(profile: mt.Profile, policy: mt.Policy) -> int:
    return profile.predict(policy, batch_size=BATCH).peak_bytes


def smallest(profile: mt.Profile, error: float) -> mt.Plan:
    """Return the plan with the least peak whose gradient error is at most `error`, to one per cent."""
    best = None
    low, high = 0.0, 1.0
    while high - low > 0.01:
        middle = (low + high) / 2
        plan = _plan(profile, middle)
        if plan is not None and (plan.predicted.gradient_error or 0.0) <= error:
            best, high = plan, middle
        else:
            low = middle
    assert best is not None, "plain itself has no error"
    return best


def _plan(profile: mt.Profile, share: float) -> mt.Plan | None:
    try:
        return mt.search_policy(profile, f"{100 * share:.2f}%", batch_size=BATCH, trials=0, objective="error")
    except BudgetError:
        return None


def _check(name: str, profile: mt.Profile, policy: mt.Policy) -> dict[str, int]:
    """Return predicted and measured peak at a batch size that was not profiled."""
    measured = mt.verify(workload(name, CHECKED, "sdpa"), policy, steps=1, seeds=1).policy.peak_bytes
    return {
        "predicted": profile.predict(policy, batch_size=CHECKED).peak_bytes,
        "measured": measured or 0,
    }


def write() -> Path:
    """Write the page from `results/mesa_table.jsonl`; return its path."""
    results = {row["subject"]: row for row in json_lines(RESULTS / "mesa_table.jsonl")}
    rows = [_row(results[name]) for name in PUBLISHED if name in results]
    columns = ("model", "baseline", "plain", "level 256", "level 16", "searched", "published")
    table = [
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *(line for row in rows for line in row),
    ]
    checks = [
        f"{TITLES[name]} {label}: {pair['predicted'] / pair['measured'] - 1:+.2%}"
        for name, result in results.items()
        for label, pair in result["check"].items()
    ]
    check = (
        f"Predicted over measured peak at batch size {CHECKED}, which was not profiled: {', '.join(checks)}."
    )
    PAGE.write_text("\n".join([HEAD, *table, "", check, ""]), encoding="utf-8")
    return PAGE


def _row(result: Mapping[str, Any]) -> list[str]:
    plain, packed = PUBLISHED[result["subject"]]
    title, fused = TITLES[result["subject"]], result["peaks"]
    published = f"{plain} → {packed} ({packed / plain:.2f})"
    return [_line(title, "fused", fused, ""), _line("", "as in Mesa's days", result["eager"], published)]


def _line(title: str, baseline: str, peaks: Mapping[str, int], published: str) -> str:
    def cell(label: str) -> str:
        return f"{peaks[label] / 1e6:.0f} ({peaks[label] / peaks['plain']:.2f})" if label in peaks else ""

    cells = [
        title,
        baseline,
        f"{peaks['plain'] / 1e6:.0f}",
        cell("256"),
        cell("16"),
        cell("searched"),
        published,
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(PUBLISHED), help=f"of {', '.join(PUBLISHED)}")
    parser.add_argument("--run", type=Path, default=Path("build/mesa"), help="folder of the profiles")
    parser.add_argument("--docs", action="store_true", help="write docs/mesa.md from the latest results")
    arguments = parser.parse_args()
    if arguments.docs:
        print(f"wrote {write()}")
        return
    for name in arguments.models.split(","):
        result = measure(name, arguments.run)
        append("mesa_table", result)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
