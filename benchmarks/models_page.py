"""Write docs/models.md: the latest results of `models.py`, and what each model saves uncompressed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, json_lines
from zoo import TUNED, ZOO

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
LARGEST = 5
BF16_ASKED = 0.27

HEAD = """\
# Models

What a training step of well-known models saves for backward, plain and with `mt.Policy.uniform(level=16)`.
`python benchmarks/models.py` measures it; `python benchmarks/models.py --docs` writes this page.

* Models are built from transformers' configurations at their published sizes; the U-Net is defined in
  `benchmarks/zoo.py`. Weights and batches are random. Images are 224 × 224 (128 × 128 for the U-Net), texts
  have 256 tokens; dropout is as published. Models in italics were never used to tune mesa-tune.
* Policy **derive** has `store: derive`: backward computes the outputs of norms and activations from what the
  layers that produce them save. For DeiT-S and ResNet-50 a search allocated the bits layer by layer within a
  share of the plain bytes, on two samples (`python benchmarks/policies.py` writes `benchmarks/policies/`).
  For the others it is uniform 16, with 32 levels for layer norms and 64 for GELU and SiLU, which serve two
  layers.
* **storages** and **resident** are saved bytes in % of the plain model's, by two independent meters: the
  storages created in the forward and alive after it, and the growth of the process. They exclude parameters,
  buffers, the batch and autocast's copies of parameters. **asked** is the largest acceptable share.
* **under a codec**: the share of the plain model's saved bytes that is not stored as PyTorch stores it. The
  rest is listed by model below, with the shape of the largest tensor.
* **error**: ‖ĝ − g‖² / ‖g‖² over all parameters, mean of three rounding seeds, at the batch size in brackets.
* **exact**: with dropout 0.1 everywhere, outputs, loss, buffers and random state are bitwise those of the
  plain model; after `mt.revert`, outputs, buffers and gradients are, too.
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
    """Write the page from `results/models.jsonl`; return its path."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(read()), encoding="utf-8")
    return PAGE


def read() -> list[dict[str, Any]]:
    """Return all results, oldest first."""
    return json_lines(RESULTS / "models.jsonl")


def page(results: Iterable[Mapping[str, Any]]) -> str:
    """Return the page of the latest `results` of each model, precision and policy."""
    latest = {(result["subject"], result["autocast"], result["policy"]): result for result in results}
    ordered = sorted(latest.values(), key=_order)
    rows = [_row(result) for result in ordered]
    parts = [HEAD, _table(COLUMNS, rows), *(_left(result) for result in ordered), _conditions(ordered)]
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
    """Return the largest acceptable share of the plain bytes, for `uniform 16` and `derive`."""
    model = ZOO[result["subject"]]
    single = {"uniform 16": model.asked, "derive": model.derived}
    half = {"uniform 16": BF16_ASKED}
    asked = (half if result["autocast"] else single).get(result["policy"])
    return "—" if asked is None else f"{asked:.0%}"


def _precision(result: Mapping[str, Any]) -> str:
    return "fp32" if result["autocast"] is None else "bf16"


def _errors(result: Mapping[str, Any]) -> list[str]:
    means = {name: error["mean"] for name, error in result.get("errors", {}).items()}
    own, uniform = means.get(result["policy"]), means.get("uniform 16")
    # A policy that is not uniform has only its own error, which is written in the column of uniform 16.
    cells = [
        "—" if error is None else f"{error:.1e} ({result['error_batch_size']})"
        for error in (means.get("uniform 256"), own, means.get("uniform 4"))
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
    text = f"{result['uncompressed_bytes'] / total:.2%} of the plain bytes stay uncompressed"
    end = f"; the table leaves out {rest / 1e6:.2f} MB in smaller parts." if rest else "."
    table = _table(("layers", "function", "tensors", "MB", "of plain"), rows)
    return head + text + end + "\n\n" + table + _derived(result)


def _derived(result: Mapping[str, Any]) -> str:
    """Return the table of layers whose inputs are computed again from what another layer saves."""
    pairs = result.get("derived", [])
    rows = [[f"`{pair['layers']}`", f"`{pair['producers']}`", str(pair["tensors"])] for pair in pairs]
    return "\nDerived:\n\n" + _table(("layers", "from what is saved by", "tensors"), rows) if rows else ""


def _conditions(results: Sequence[Mapping[str, Any]]) -> str:
    """Return when, where and with which versions the results were measured."""
    lines = {
        f"* {result['date'][:10]}: {result['hardware']['cpu']}, {result['hardware']['threads']} threads, "
        f"torch {result['versions']['torch']}, transformers {result['versions'].get('transformers')}"
        for result in results
    }
    return "\n## Measured\n\n" + "\n".join(sorted(lines)) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
