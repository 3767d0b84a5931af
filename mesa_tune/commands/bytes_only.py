"""`mesa-tune profile --bytes-only`: the bytes of a model file or a configuration, without the memory."""

from __future__ import annotations

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
)
from mesa_tune.commands.guide.advice import advice
from mesa_tune.errors import WorkloadError

if TYPE_CHECKING:
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

    def check(self, *, bytes_only: bool, fast: bool) -> None:
        """Raise WorkloadError for arguments that exclude each other."""
        if self.is_configuration and not bytes_only:
            raise WorkloadError(
                f"{self.model}: a configuration alone has no data to train on\nadd --bytes-only"
            )
        if self.length is not None and not self.is_configuration:
            raise WorkloadError(f"--length {self.length}: is for hf:CONFIG.json\nleave it out")
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
    from mesa_tune.profiler.bytes_only import bytes_only_profile
    from mesa_tune.workload.workload import default_device

    device = request.device or default_device()
    cuda = device.partition(":")[0] == "cuda"
    workload, about = request.workload()
    output.device(device, "bytes only: nothing runs there")
    output.line(f"tracing {about} at batch size {workload.batch_size}")
    inputs = digest("bytes only", workload.description, device, about)
    folder.check(folder.profile, inputs)
    profiled = bytes_only_profile(workload, cuda=cuda)
    folder.write(folder.profile, dump_json(profiled.to_dict()), inputs)
    for line in _lines(profiled, request, folder):
        output.line(line)
    output.document("profile", profiled.to_dict())


def replacing_bytes(folder: Run, inputs: str) -> Origin:
    """Return `inputs` of a profile with prices, which may replace one of bytes only: that took seconds."""
    from mesa_tune.errors import RunError
    from mesa_tune.profiler.profile import Profile

    try:
        known = Profile.load(folder.profile) if folder.profile.is_file() else None
    except RunError:
        known = None
    return Origin(inputs, derived=known is not None and known.step_ms is None)


_FITS = 'on a card: mt.estimate(workload, device="cuda").fits("24GB")'


def _lines(profiled: Profile, request: Request, folder: Run) -> list[str]:
    owners = sorted(profiled.layers, key=lambda layer: -layer.own_bytes)
    rows = [[layer.name, layer.tag, format_bytes(layer.own_bytes)] for layer in owners[:_MAX_ROWS]]
    rest = sum(layer.own_bytes for layer in owners[_MAX_ROWS:])
    if rest:
        rows.append([f"{len(owners) - _MAX_ROWS} further layers", "", format_bytes(rest)])
    static = format_bytes(profiled.static_bytes)
    return [
        *(f"note: {note}" for note in profiled.notes),
        f"peak of a step   {format_bytes(profiled.peak_bytes):>8}   (weights, optimizer, batch: {static})",
        *below(profiled.predict_assignment({}).workspaces_text),
        *below(_FITS if profiled.device == "cuda" else ""),
        f"saved activations {format_bytes(profiled.saved_bytes):>7}   in {len(profiled.layers)} layers",
        *_under_policies(profiled),
        *advice(profiled, None),
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
    return f"mesa-tune profile {request.model}{folder.option}, which also measures errors and times"


def _under_policies(profiled: Profile) -> list[str]:
    """Return the bytes under 8 and 4 bits everywhere."""
    from mesa_tune.policy import Policy

    lines = []
    for level, bits in ((256, 8), (16, 4)):
        predicted = profiled.predict(Policy.uniform(level=level))
        saved, peak = format_bytes(predicted.saved_bytes), format_bytes(predicted.peak_bytes)
        lines.append(f"at {bits} bits         {peak:>8}   (saved activations: {saved})")
        lines += below(predicted.workspaces_text)
    return lines
