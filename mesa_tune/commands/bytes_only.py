"""`mesa-tune profile --bytes-only`: the bytes of a model file or a configuration, without the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
from mesa_tune.commands.searching.fits import fits_table, fitting, shown_policies
from mesa_tune.errors import WorkloadError

if TYPE_CHECKING:
    from mesa_tune.profiles.profile import Profile
    from mesa_tune.workload.workload import Workload

_HF = "hf:"
_MAX_ROWS = 12


@dataclass(frozen=True)
class Request:
    """Arguments of the command; `model` is a model file, or `hf:` and a configuration."""

    model: str
    batch_size: int | None
    length: int | None
    device: str | None
    autocast: str | None
    fits: str | None = None
    lora: int | None = None

    def check(self, *, bytes_only: bool, fast: bool) -> None:
        """Raise WorkloadError for arguments that exclude each other."""
        if self.is_configuration and not bytes_only:
            raise WorkloadError(
                f"{self.model}: a configuration alone has no data to train on\nadd --bytes-only"
            )
        if self.length is not None and not bytes_only:
            raise WorkloadError(f"--length {self.length}: is for --bytes-only\nset LENGTH in the model file")
        if self.lora is not None and not self.is_configuration:
            raise WorkloadError(f"--lora {self.lora}: is for hf:CONFIG\nleave it out")
        if self.fits is not None and not bytes_only:
            raise WorkloadError(
                f"--fits {self.fits}: is for --bytes-only\nadd it, or search with --budget {self.fits}"
            )
        if bytes_only and fast:
            raise WorkloadError("--fast and --bytes-only: exclude each other\nleave one of them out")

    @property
    def is_configuration(self) -> bool:
        """Whether the model is a configuration of transformers."""
        return self.model.startswith(_HF)

    def workload(self) -> tuple[Workload, str]:
        """Return the workload on the CPU, and what it trains in words."""
        from mesa_tune.workload.hf import configured
        from mesa_tune.workload.workload import Workload

        if self.is_configuration:
            return configured(
                self.model.removeprefix(_HF),
                batch_size=self.batch_size,
                length=self.length,
                autocast=self.autocast,
                lora=self.lora,
            )
        path = Path(self.model)
        workload = Workload.load(
            path, batch_size=self.batch_size, length=self.length, device="cpu", autocast=self.autocast
        )
        return workload, str(path)


def profile_bytes(request: Request, folder: Run, output: Output) -> None:
    """Trace the step on fake tensors, write the profile, and print its bytes."""
    from mesa_tune.estimation import parse_limit
    from mesa_tune.free_memory import is_cuda
    from mesa_tune.measure.bytes_only import bytes_only_profile
    from mesa_tune.workload.workload import default_device

    if request.fits is not None:
        parse_limit(request.fits)
    device = request.device or default_device()
    cuda = is_cuda(device)
    workload, about = request.workload()
    output.device(device, "bytes only: nothing runs there")
    output.line(f"tracing {about} at batch size {workload.batch_size}")
    inputs = digest("bytes only", workload.description, device, about)
    origin = replacing_bytes(folder, inputs)
    folder.check(folder.profile, origin)
    profiled = bytes_only_profile(workload, cuda=cuda)
    folder.write(folder.profile, dump_json(profiled.to_dict()), origin)
    try:
        fits = [] if request.fits is None else fitting(workload, profiled, device, request.fits, output)
    finally:
        output.status("")
    for line in _lines(profiled, request, folder, fits_table(fits, device, request.fits)):
        output.line(line)
    output.document("profile", profiled.to_dict())


def replacing_bytes(folder: Run, inputs: str) -> Origin:
    """Return `inputs` of a profile, which may replace one of bytes only or of a script: that took seconds."""
    from mesa_tune.errors import RunError
    from mesa_tune.profiles.profile import Profile

    try:
        known = Profile.load(folder.profile) if folder.profile.is_file() else None
    except RunError:
        known = None
    return Origin(inputs, derived=known is not None and (known.step_ms is None or known.script is not None))


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
    for name, policy in list(shown_policies().items())[1:]:
        predicted = profiled.predict(policy)
        saved, peak = format_bytes(predicted.saved_bytes), format_bytes(predicted.peak_bytes)
        lines.append(f"{name:<17}{peak:>8}   (saved activations: {saved})")
    return lines
