"""`mesa-tune profile --bytes-only`: the bytes of a model file or a configuration, without the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mesa_tune.commands.common import (
    Origin,
    Output,
    Run,
    below,
    digest,
    dump_json,
    format_bytes,
    format_table,
    noted,
)
from mesa_tune.commands.guide.advice import advice
from mesa_tune.errors import WorkloadError

if TYPE_CHECKING:
    from mesa_tune.policy import Policy
    from mesa_tune.profiler.profile import Profile
    from mesa_tune.workload.workload import Workload

_HF = "hf:"
_MAX_ROWS = 12


@dataclass(frozen=True)
class Request:
    """Arguments of the command; `model` is a model file, or `hf:` and a configuration file."""

    model: str
    batch_size: int | None
    length: int | None
    device: str | None
    autocast: str | None
    fits: str | None = None

    def check(self, *, bytes_only: bool, fast: bool) -> None:
        """Raise WorkloadError for arguments that exclude each other."""
        if self.is_configuration and not bytes_only:
            raise WorkloadError(
                f"{self.model}: a configuration alone has no data to train on\nadd --bytes-only"
            )
        if self.length is not None and not self.is_configuration:
            raise WorkloadError(f"--length {self.length}: is for hf:CONFIG.json\nleave it out")
        if self.fits is not None and not bytes_only:
            raise WorkloadError(
                f"--fits {self.fits}: is for --bytes-only\nadd it, or search with --budget {self.fits}"
            )
        if bytes_only and fast:
            raise WorkloadError("--fast and --bytes-only: exclude each other\nleave one of them out")

    @property
    def is_configuration(self) -> bool:
        """Whether the model is a configuration file of transformers."""
        return self.model.startswith(_HF)

    def workload(self) -> tuple[Workload, str]:
        """Return the workload on the CPU, and what it trains in words."""
        from mesa_tune.workload.hf import configured
        from mesa_tune.workload.workload import Workload

        if self.is_configuration:
            path = Path(self.model.removeprefix(_HF))
            return configured(path, batch_size=self.batch_size, length=self.length, autocast=self.autocast)
        path = Path(self.model)
        workload = Workload.load(path, batch_size=self.batch_size, device="cpu", autocast=self.autocast)
        return workload, str(path)


def profile_bytes(request: Request, folder: Run, output: Output) -> None:
    """Trace the step on fake tensors, write the profile, and print its bytes."""
    from mesa_tune.estimation import parse_limit
    from mesa_tune.profiler.bytes_only import bytes_only_profile
    from mesa_tune.workload.workload import default_device, is_cuda

    if request.fits is not None:
        parse_limit(request.fits)
    device = request.device or default_device()
    cuda = is_cuda(device)
    workload, about = request.workload()
    output.device(device, "bytes only: nothing runs there")
    output.line(f"tracing {about} at batch size {workload.batch_size}")
    inputs = digest("bytes only", workload.description, device, about)
    folder.check(folder.profile, inputs)
    profiled = bytes_only_profile(workload, cuda=cuda)
    folder.write(folder.profile, dump_json(profiled.to_dict()), inputs)
    try:
        fits = [] if request.fits is None else _fits(workload, profiled, device, request.fits, output)
    finally:
        output.status("")
    for line in _lines(profiled, request, folder, _fits_table(fits, device, request.fits)):
        output.line(line)
    output.document("profile", profiled.to_dict())


class _Fit(NamedTuple):
    """Whether the step under the policy called `name` fits into a limit, and up to which batch size."""

    name: str
    needed_bytes: int
    fits: bool
    largest_batch: int


def _fits(workload: Workload, profiled: Profile, device: str, limit: str, output: Output) -> list[_Fit]:
    """Return what fits into `limit` on the device, policy by policy."""
    from mesa_tune.estimation import estimate
    from mesa_tune.notice import unnoticed
    from mesa_tune.profiler.tiled_step import SLICES, tiling

    policies = _policies()
    losses = [layer.name for layer in profiled.layers if layer.tag == "loss"]
    policies[_SLICED] = tiling(policies["at 4 bits"], losses, SLICES)
    found: list[_Fit] = []
    for name, policy in policies.items():
        output.status(f"{name}: which batch sizes fit into {limit}")
        with unnoticed():  # a loss that cannot have slices has no row
            fit = estimate(workload, policy, device=device)
        found.append(_Fit(name, fit.needed_bytes, fit.fits(limit), fit.largest_batch(limit)))
    if found[-1][1:] == found[-2][1:]:
        del found[-1]
    return found


def _fits_table(fits: Sequence[_Fit], device: str, limit: str | None) -> list[str]:
    rows = [
        [fit.name, format_bytes(fit.needed_bytes), "yes" if fit.fits else "no", str(fit.largest_batch)]
        for fit in fits
    ]
    header = [f"on {device}", "needs", f"fits {limit}", "largest batch"]
    return ["", *format_table(header, rows)] if rows else []


_SLICED = "at 4 bits, loss in slices"


def _policies() -> dict[str, Policy]:
    """Return the policies whose bytes are shown, by name."""
    from mesa_tune.policy import Policy

    return {
        "plain": Policy(()),
        **{f"at {bits} bits": Policy.uniform(level=2**bits) for bits in (8, 4)},
    }


def replacing_bytes(folder: Run, inputs: str) -> Origin:
    """Return `inputs` of a profile with prices, which may replace one of bytes only: that took seconds."""
    from mesa_tune.errors import RunError
    from mesa_tune.profiler.profile import Profile

    try:
        known = Profile.load(folder.profile) if folder.profile.is_file() else None
    except RunError:
        known = None
    return Origin(inputs, derived=known is not None and known.step_ms is None)


_FITS = "with the allocator's share: --fits 24GB"


def _lines(profiled: Profile, request: Request, folder: Run, fitting: Sequence[str]) -> list[str]:
    owners = sorted(profiled.layers, key=lambda layer: -layer.own_bytes)
    rows = [[layer.name, layer.tag, format_bytes(layer.own_bytes)] for layer in owners[:_MAX_ROWS]]
    rest = sum(layer.own_bytes for layer in owners[_MAX_ROWS:])
    if rest:
        rows.append([f"{len(owners) - _MAX_ROWS} further layers", "", format_bytes(rest)])
    static, plain = format_bytes(profiled.static_bytes), profiled.predict_assignment({})
    return [
        *noted(profiled.notes),
        f"peak of a step   {format_bytes(profiled.peak_bytes):>8}   (weights, optimizer, batch: {static})",
        *below("" if plain.peak is None else plain.peak.text),
        *below(plain.workspaces_text),
        *below(_FITS if profiled.device == "cuda" and not fitting else ""),
        f"saved activations {format_bytes(profiled.saved_bytes):>7}   in {len(profiled.layers)} layers",
        *_under_policies(profiled),
        *advice(profiled, None),
        *fitting,
        "",
        *format_table(["layer", "tag", "saves"], rows),
        "",
        f"wrote {folder.profile}",
        f"next: {_next(request, folder)}",
    ]


def _next(request: Request, folder: Run) -> str:
    """Return the command that also measures what a search needs."""
    if request.is_configuration:
        return "mesa-tune init, for a model.py with data: a search needs errors and times"
    return f"mesa-tune profile {request.model}{folder.option}, for errors and times, too"


def _under_policies(profiled: Profile) -> list[str]:
    """Return the bytes under 8 and 4 bits everywhere."""
    lines = []
    for name, policy in list(_policies().items())[1:]:
        predicted = profiled.predict(policy)
        saved, peak = format_bytes(predicted.saved_bytes), format_bytes(predicted.peak_bytes)
        lines.append(f"{name:<17}{peak:>8}   (saved activations: {saved})")
        lines += below(predicted.workspaces_text)
    return lines
