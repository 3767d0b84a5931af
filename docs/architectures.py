"""Generator of docs/architectures.md: results of the sweep over transformers' model types, in one table.

python -m benchmarks.sweeps transformers      # measures
python -m docs.architectures             # writes the page
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sweeps import runner
from benchmarks.sweeps.checks import SPREAD
from benchmarks.sweeps.runner import RIGHT, SKIPPED, WRONG, Line, Results
from benchmarks.sweeps.transformers_models import LAYERS

PAGE = Path(__file__).with_name("architectures.md")
RESULTS = runner.ROOT / "build" / "sweeps" / "transformers.jsonl"
ALLOWED = 0.03  # share of plain's saved bytes that may stay exact because no formula exists

HEAD = """\
# Architectures

Every model type of transformers that builds from a tiny configuration, trained plain and converted.
Generated: `python -m benchmarks.sweeps transformers` measures, `python -m docs.architectures` writes.

* Weights and batches are random. Steps run at level 256, 16, and 16 with `store: derive`; in fp32,
  under bfloat16 autocast, and with both kinds of gradient checkpointing. Tensors of up to 1,024 elements stay
  exact.
* **right**: variants whose loss is bitwise plain's, whose gradients are finite where plain's are, and whose
  squared relative gradient error is within {bound:g} / (level - 1)² (twice what one operator is allowed, the
  median of five rounding seeds where that of the first is larger) or three times that of the plain model with
  rounded queries and keys (with derive: and inputs of activations; under autocast: or of bfloat16 itself);
  with checkpointing within three times of that without; and whose predicted saved bytes are within 1 % of a
  real step's. Of those that plain runs, ends and repeats.
* **error**: that of level 16 in fp32. **exact**: the share of plain's saved bytes, in tensors of more than
  16 KiB, that stays exact because no formula serves the function that is named.

"""


def page(lines: Iterable[Line]) -> str:
    """Return the page for these results."""
    by_type: dict[str, dict[str, Line]] = {}
    for line in lines:
        by_type.setdefault(line.name, {})[line.variant] = line
    built = {
        name: variants
        for name, variants in by_type.items()
        if any(line.result != SKIPPED for line in variants.values())
    }
    rows = [_row(name, variants) for name, variants in sorted(built.items())]
    columns = ("model type", "class", "right", "error", "exact", "wrong")
    return HEAD.format(bound=LAYERS * SPREAD) + _counts(built, len(by_type)) + "\n" + _table(columns, rows)


def _counts(built: Mapping[str, Mapping[str, Line]], total: int) -> str:
    right = sum(not any(line.result in WRONG for line in lines.values()) for lines in built.values())
    shares = [share for lines in built.values() if (share := _share(lines)) is not None]
    within = sum(share <= ALLOWED for share in shares)
    return (
        f"{len(built)} of {total} model types build; {right} are right in every variant. "
        f"On {within} of {len(shares)} "
        f"at most {ALLOWED:.0%} stays exact because no formula exists.\n"
    )


def _row(name: str, lines: Mapping[str, Line]) -> Sequence[str]:
    tried = [line for line in lines.values() if line.result != SKIPPED]
    figures: Mapping[str, Any] = {} if "16 plain" not in lines else lines["16 plain"].figures
    error = f"{figures['error']:.1e}" if "error" in figures else "—"
    wrong = "; ".join(f"{line.variant}: {line.cause[:60]}" for line in tried if line.result in WRONG)
    right = f"{sum(line.result == RIGHT for line in tried)} of {len(tried)}"
    return name, str(figures.get("head", "—")), right, error, _exact(lines), wrong.replace("|", "/") or "—"


def _no_formula(lines: Mapping[str, Line]) -> Mapping[str, float] | None:
    profiled = lines.get("profile plain")
    return None if profiled is None else profiled.figures.get("no_formula")


def _share(lines: Mapping[str, Line]) -> float | None:
    functions = _no_formula(lines)
    return None if functions is None else sum(functions.values())


def _exact(lines: Mapping[str, Line]) -> str:
    functions = _no_formula(lines)
    if functions is None:
        return "—"
    named = ", ".join(f"`{name}`" for name, share in functions.items() if share > ALLOWED / 10)
    return f"{sum(functions.values()):.1%} {named}".strip()


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(Results(RESULTS).lines()), encoding="utf-8")
