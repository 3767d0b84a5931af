"""`docs/models.md`: the latest results of `models.py` in one table, and what each model has uncompressed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS
from zoo import TUNED, ZOO

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
LARGEST = 5
BF16_ASKED = 0.27

HEAD = """\
# Models

What a training step of well-known models keeps for backward, plain and with `mt.Policy.uniform(level=16)`.
Generated: `python benchmarks/models.py` measures, `python benchmarks/models.py --docs` writes this page.

* Models are built from transformers' configurations at their published sizes; the U-Net is our own
  (`benchmarks/zoo.py`). Weights and batches are random; images are 224 × 224 (128 × 128 for the U-Net), texts
  256 long; dropout is as published. Models in italics show what happens to models that nobody tuned for.
* Policy **derive** has `store: derive`: outputs of norms, activations and gates are made again from what
  their producers keep. For DeiT-S and ResNet-50 a search placed bits layer by layer within a share of plain's
  bytes, on two samples (`python benchmarks/policies.py` writes `benchmarks/policies/`); for the others it is
  uniform 16, with 32 levels for what layer norms keep and 64 for GELU and SiLU, which then serve two layers.
* **storages** and **resident** are saved bytes in % of the plain model's, by two meters that share no code:
  storages born in the forward and alive after it, and the growth of the process. Parameters, buffers, the
  batch and autocast's copies of parameters are left out. **asked** is the most that they may be.
* **under a codec**: the share of the plain model's saved bytes that does not stay as PyTorch keeps it. What
  is left is listed by model below, with the shape of the largest tensor.
* **error**: ‖ĝ − g‖² / ‖g‖² over all parameters, mean of three rounding seeds, at the batch in brackets.
* **exact**: with dropout 0.1 everywhere, outputs, loss, buffers and random state are bitwise those of the
  plain model; and after `mt.revert` outputs, buffers and gradients are, too.
"""
COLUMNS = (
    "model",
    "precision",
    "policy",
    "batch",
    "plain MB",
    "asked",
    "storages",
    "resident",
    "under a codec",
    "error 256",
    "error 16",
    "error 4",
    "exact",
)


def write() -> Path:
    """Writes the page from `results/models.jsonl`; returns its path."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(read()), encoding="utf-8")
    return PAGE


def read() -> list[dict[str, Any]]:
    """All results, oldest first."""
    path = RESULTS / "models.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []


def page(results: Iterable[Mapping[str, Any]]) -> str:
    """The page of the latest of `results`, by model, precision and policy."""
    latest = {(each["subject"], each["autocast"], each["policy"]): each for each in results}
    ordered = sorted(latest.values(), key=_order)
    rows = [_row(each) for each in ordered]
    parts = [HEAD, _table(COLUMNS, rows), *(_left(each) for each in ordered), _conditions(ordered)]
    return "\n".join(parts)


def _order(result: Mapping[str, Any]) -> tuple[bool, int, bool, str]:
    name = result["subject"]
    return name not in TUNED, list(ZOO).index(name), result["autocast"] is not None, result["policy"]


def _row(result: Mapping[str, Any]) -> list[str]:
    share = result["share"]
    return [
        _title(result),
        _precision(result),
        result["policy"],
        str(result["batch_size"]),
        f"{result['plain']['storages'] / 1e6:,.0f}",
        _asked(result),
        f"{share['storages']:.1%}",
        f"{share['resident']:.1%}",
        f"{result['under_codec']:.2%}",
        *_errors(result),
        _exact(result),
    ]


def _title(result: Mapping[str, Any]) -> str:
    title = ZOO[result["subject"]].title
    return title if result["subject"] in TUNED else f"*{title}*"


def _asked(result: Mapping[str, Any]) -> str:
    """The share of plain's bytes that the project promises at uniform 16, or where all is derived."""
    model = ZOO[result["subject"]]
    single = {"uniform 16": model.asked, "derive": model.derived}
    half = {"uniform 16": BF16_ASKED}
    asked = (half if result["autocast"] else single).get(result["policy"])
    return "—" if asked is None else f"{asked:.0%}"


def _precision(result: Mapping[str, Any]) -> str:
    return "fp32" if result["autocast"] is None else "bf16"


def _errors(result: Mapping[str, Any]) -> list[str]:
    found = {name: each["mean"] for name, each in result.get("errors", {}).items()}
    own, uniform = found.get(result["policy"]), found.get("uniform 16")
    # A policy other than the uniform ones has one error, which stands where uniform 16's would.
    cells = [
        "—" if one is None else f"{one:.1e} ({result['error_batch_size']})"
        for one in (found.get("uniform 256"), own, found.get("uniform 4"))
    ]
    if own is not None and uniform is not None and result["policy"] != "uniform 16":
        cells[1] += f", {own / uniform:.2f} × uniform 16's"
    return cells


def _exact(result: Mapping[str, Any]) -> str:
    if "differs" not in result:
        return "—"
    return "yes" if not result["differs"] else f"no: {', '.join(result['differs'])}"


def _left(result: Mapping[str, Any]) -> str:
    total = result["plain"]["storages"]
    head = f"\n## {ZOO[result['subject']].title}, {_precision(result)}, {result['policy']}\n\n"
    rows = [
        [
            f"`{row['layers']}`",
            row["function"],
            f"{row['tensors']} of {'×'.join(map(str, row['shape']))} {row['dtype']}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['bytes'] / total:.2%}",
        ]
        for row in result["left"][:LARGEST]
    ]
    rest = sum(row["bytes"] for row in result["left"][LARGEST:])
    text = f"{result['uncompressed_bytes'] / total:.2%} of the plain bytes stay as they are"
    more = f"; further {rest / 1e6:.2f} MB in smaller parts." if rest else "."
    table = _table(("layers", "function", "tensors", "MB", "of plain"), rows)
    return head + text + more + "\n\n" + table + _derived(result)


def _derived(result: Mapping[str, Any]) -> str:
    """Which layers store nothing of an input, as they have its producer's output made again."""
    pairs = result.get("derived", [])
    rows = [[f"`{each['layers']}`", f"`{each['producers']}`", str(each["tensors"])] for each in pairs]
    return "\nDerived:\n\n" + _table(("layers", "from what is kept by", "tensors"), rows) if rows else ""


def _conditions(results: Sequence[Mapping[str, Any]]) -> str:
    """When, where and with which versions the results were measured."""
    lines = {
        f"* {each['date'][:10]}: {each['hardware']['cpu']}, {each['hardware']['threads']} threads, "
        f"torch {each['versions']['torch']}, transformers {each['versions'].get('transformers')}"
        for each in results
    }
    return "\n## Measured\n\n" + "\n".join(sorted(lines)) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
