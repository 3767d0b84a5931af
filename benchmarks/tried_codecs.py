"""How large is the gradient error of other ways to store what linear layers save, at equal bytes?

    python benchmarks/tried_codecs.py [--steps 600] [--batches 8] [--seeds 4]

The codecs of this file are not part of mesa-tune: by these figures none is better than what is. The model is
the digits ViT, trained for `--steps` steps. All its linear layers have one of the settings, and all other
layers are exact; then all its GELUs. Bits per element are of a tensor of 2,080 rows and 64 columns, as many
of its layers save. Codecs of this file count the bytes of their format, and pack nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from below_one_bit import TAGS, parsed, policy_of
from common import append
from search_vs_uniform import GradientError, trained_workload, unseen_batches
from torch import Tensor
from torch.nn import functional as F

import mesa_tune as mt
from mesa_tune.codecs import CODECS, Memory, Spec, quantize
from mesa_tune.policy.settings import STORES, LayerSettings

GELU = ("gelu",)


@dataclass(frozen=True)
class Tried:
    """A codec that stores a changed copy and counts the bytes that its format would take."""

    def encode(self, x: Tensor, spec: Spec, key: Tensor, memory: Memory | None = None) -> list[Tensor]:
        return [self.copy(x, spec, key)]

    def decode(self, parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> Tensor:
        return parts[0].view(tuple(shape))

    def packed_bytes(self, shape: Sequence[int], spec: Spec, element_size: int = 4) -> int:
        return math.ceil(self.bytes_per_element(spec) * math.prod(shape))

    def copy(self, x: Tensor, spec: Spec, key: Tensor) -> Tensor:
        raise NotImplementedError

    def bytes_per_element(self, spec: Spec) -> float:
        raise NotImplementedError


def quantized(x: Tensor, spec: Spec, key: Tensor) -> Tensor:
    return quantize.decode(quantize.encode(x.contiguous(), spec, key), x.shape, x.dtype, spec)


def quantized_bytes(spec: Spec) -> float:
    return quantize.packed_bytes((1 << 20,), spec._replace(codec="quantize")) / (1 << 20)


def generator(key: Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(int(key) % 2**31)


@dataclass(frozen=True)
class Project(Tried):
    """x P, quantized: CompAct (arXiv 2410.15352). E[P Pᵀ] = 1, P is `share` as wide as high."""

    share: float
    orthonormal: bool

    def copy(self, x: Tensor, spec: Spec, key: Tensor) -> Tensor:
        high = x.shape[-1]
        wide = max(1, round(high * self.share))
        matrix = torch.randn(high, wide, generator=generator(key))
        if self.orthonormal:
            matrix = torch.linalg.qr(matrix).Q * math.sqrt(high)
        matrix /= math.sqrt(wide)
        return quantized(x @ matrix, spec, key) @ matrix.T

    def bytes_per_element(self, spec: Spec) -> float:
        return self.share * quantized_bytes(spec)


@dataclass(frozen=True)
class Outliers(Tried):
    """The largest magnitudes exact, the others quantized: HyC-LoRA.

    An outlier takes 3 bytes: 2 for the value, 1 for its position in a group of 256.
    """

    share: float

    def copy(self, x: Tensor, spec: Spec, key: Tensor) -> Tensor:
        flat = x.flatten()
        top = flat.abs().topk(max(1, round(flat.numel() * self.share))).indices
        marked = flat.index_fill(0, top, math.nan)
        groups = F.pad(marked, (0, -flat.numel() % spec.group_size), value=math.nan).view(-1, spec.group_size)
        rest = torch.where(groups.isnan(), groups.nanmean(1, keepdim=True).nan_to_num(), groups)
        return quantized(rest.flatten()[: flat.numel()], spec, key).index_copy(0, top, flat[top])

    def bytes_per_element(self, spec: Spec) -> float:
        return quantized_bytes(spec) + 3 * self.share


@dataclass(frozen=True)
class BlockMean(Tried):
    """Means of blocks of rows in 16 bits, and the quantized difference: DIVISION (arXiv 2208.04187)."""

    rows: int

    def copy(self, x: Tensor, spec: Spec, key: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        blocks = F.pad(rows, (0, 0, 0, -len(rows) % self.rows)).view(-1, self.rows, rows.shape[1])
        means = blocks.mean(1, keepdim=True).half().float()
        return (quantized(blocks - means, spec, key) + means).reshape(-1, rows.shape[1])[: len(rows)]

    def bytes_per_element(self, spec: Spec) -> float:
        return quantized_bytes(spec) + 2 / self.rows


@dataclass(frozen=True)
class Elements(Tried):
    """Elements chosen with p = min(1, c |x|) and stored as x / p: unbiased.

    Each takes 2 bits and its position, as in `drop`.
    """

    share: float

    def copy(self, x: Tensor, spec: Spec, key: Tensor) -> Tensor:
        size, wanted = x.abs(), x.numel() * self.share
        scale = wanted / size.sum()
        for _ in range(30):
            certain = scale * size >= 1
            scale = (wanted - certain.sum()) / size[~certain].sum()
        chances = (scale * size).clamp(max=1)
        drawn = torch.rand(x.shape, generator=generator(key)) < chances
        return torch.where(drawn, x / chances, 0.0)

    def bytes_per_element(self, spec: Spec) -> float:
        low = math.floor(-math.log2(self.share))
        return (self.share * (low + 1 + 2) + 2**-low) / 8


def tried(codec: Tried, bits: int = 4) -> LayerSettings:
    """Return the settings by which a layer stores with `codec`."""
    name = repr(codec)
    if name not in CODECS:
        CODECS[name] = codec
        STORES.append(name)
    return LayerSettings(level=2**bits, store=name)


def linear_settings() -> dict[str, LayerSettings]:
    """Return what linear layers store, by name."""
    settings = {f"{bits} bits": LayerSettings(level=2**bits) for bits in (3, 2, 1)}
    settings |= {
        f"{bits} bits rows {share}": LayerSettings(level=2**bits, rows=share)
        for bits, share in ((4, 0.5), (4, 0.25), (2, 0.25), (2, 0.1))
    }
    settings |= {
        f"{bits} bits drop {share}": LayerSettings(level=2**bits, drop=share)
        for bits, share in ((2, 0.5), (2, 0.75), (2, 0.9), (2, 0.97), (2, 0.9999))
    }
    for orthonormal in (False, True):
        kind = "orthonormal" if orthonormal else "Gaussian"
        for bits, share in ((4, 0.5), (4, 0.25), (2, 0.25), (4, 0.1)):
            settings[f"{bits} bits project {share} {kind}"] = tried(Project(share, orthonormal), bits)
    for bits, share in ((1, 0.01), (2, 0.001), (2, 0.01), (3, 0.001), (3, 0.01)):
        settings[f"{bits} bits outliers {share}"] = tried(Outliers(share), bits)
    for bits, rows in ((1, 8), (2, 8), (2, 4)):
        settings[f"{bits} bits block mean {rows}"] = tried(BlockMean(rows), bits)
    return settings | {f"elements {share}": tried(Elements(share)) for share in (0.4, 0.25, 0.1, 0.05)}


def gelu_settings() -> dict[str, LayerSettings]:
    """Return what GELUs store, by name."""
    settings = {f"GELU {bits} bits": LayerSettings(level=2**bits) for bits in (4, 3, 2, 1)}
    settings |= {
        f"GELU {bits} bits group_size 1024": LayerSettings(level=2**bits, group_size=1024)
        for bits in (4, 3, 2, 1)
    }
    return settings | {
        f"GELU {2**bits} fixed levels": LayerSettings(level=2**bits, store="levels") for bits in (4, 3, 2, 1)
    }


def bits_per_element(settings: LayerSettings) -> float:
    """Return the bits of a large tensor, ranges, positions and marks included."""
    spec = Spec.of(settings, 0)
    assert spec is not None
    rows, columns = 2080, 64
    packed_bytes = CODECS[spec.codec].packed_bytes((rows, columns), spec._replace(axis=-1))
    return 8 * packed_bytes / (rows * columns)


def main() -> None:
    arguments = parsed(__doc__)
    workload = trained_workload("digits", arguments.steps)
    profile = mt.profile(workload, options=[])
    unseen = GradientError(workload, unseen_batches(workload, arguments.batches))
    for tags, every in ((TAGS, linear_settings()), (GELU, gelu_settings())):
        for name, settings in every.items():
            policy = policy_of(profile, settings, tags)
            error, bits = unseen.error(policy, arguments.seeds), bits_per_element(settings)
            print(f"{name:32s} {bits:6.3f} bits  error {error:.2g}", flush=True)
            result = {"subject": "digits ViT", "steps": arguments.steps, "setting": name}
            append("tried_codecs", {**result, "bits": bits, "error": error})


if __name__ == "__main__":
    main()
