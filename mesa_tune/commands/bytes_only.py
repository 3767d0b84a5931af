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
    wrapped,
)
from mesa_tune.commands.guide.advice import advice
from mesa_tune.errors import MesaTuneError, WorkloadError

if TYPE_CHECKING:
    from mesa_tune.policy import Policy
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
        fits = [] if request.fits is None else _fits(workload, profiled, device, request.fits, output)
    finally:
        output.status("")
    for line in _lines(profiled, request, folder, _fits_table(fits, device, request.fits)):
        output.line(line)
    output.document("profile", profiled.to_dict())


class _Fit(NamedTuple):
    """Whether the step under the policy called `name` fits into a limit, and up to which sizes.

    `largest_length`: at the batch size; None for samples without length.
    """

    name: str
    needed_bytes: int
    fits: bool
    largest_batch: int
    largest_length: int | None = None


def _fits(workload: Workload, profiled: Profile, device: str, limit: str, output: Output) -> list[_Fit]:
    """Return what fits into `limit` on the device, policy by policy."""
    from torch.utils.checkpoint import CheckpointError

    from mesa_tune.estimation import blocks_of, estimate
    from mesa_tune.measure.rerun_modules.blocks import rerunning, whole
    from mesa_tune.notice import unnoticed
    from mesa_tune.profiles.tiled_step import SLICES, tiling

    policies = _policies()
    losses = [layer.name for layer in profiled.layers if layer.tag == "loss"]
    policies[SLICED] = tiling(policies["at 4 bits"], losses, SLICES)
    plain = estimate(workload, device=device)
    if blocks := blocks_of(plain):
        policies[AGAIN] = rerunning(policies[SLICED], whole(blocks))
    found: dict[str, _Fit] = {}
    for name, policy in policies.items():
        output.status(f"{name}: which batch sizes fit into {limit}")
        try:
            with unnoticed():  # a loss that cannot have slices has no row
                fit = estimate(workload, policy, device=device) if policy.rules else plain
        except (MesaTuneError, CheckpointError):  # such as a block that changes its input in place
            if name not in _SETTINGS:
                raise
            continue
        length = None if workload.length is None else fit.largest_length(limit)
        row = _Fit(name, fit.needed_bytes, fit.fits(limit), fit.largest_batch(limit), length)
        if name not in _SETTINGS or row[1:] not in [known[1:] for known in found.values()]:
            found[name] = row
    return list(found.values())


def _fits_table(fits: Sequence[_Fit], device: str, limit: str | None) -> list[str]:
    rows = [
        [
            fit.name,
            format_bytes(fit.needed_bytes),
            "yes" if fit.fits else "no",
            str(fit.largest_batch),
            *([] if fit.largest_length is None else [str(fit.largest_length)]),
        ]
        for fit in fits
    ]
    if not rows:
        return []
    header = [f"on {device}", "needs", f"fits {limit}", "largest batch", "longest"][: len(rows[0])]
    return ["", *format_table(header, rows), *_explained([fit.name for fit in fits], device, limit or "")]


SLICED, AGAIN = "at 4 bits, loss in slices", "…, blocks that run again"
_SETTINGS = {SLICED: "`tile: 8` in `on loss:`", AGAIN: "`store: recompute` in `on module:`"}


def _explained(names: Sequence[str], device: str, limit: str) -> list[str]:
    """Return what the rows mean and how they are had, in lines of at most 80 characters."""
    from mesa_tune.free_memory import room_text

    had = [f"{name.split(', ')[-1]}: {how}" for name, how in _SETTINGS.items() if name in names]
    texts = [f"needs: with {room_text(device)}", "; ".join(had)]
    if device.startswith("cuda") and limit.lower().endswith("gb"):
        texts.append("cards are sold by GiB, which are 7 % more: a card of 24 GB has 24GiB")
    return [line for text in texts if text for line in wrapped(text, 2)]


def _policies() -> dict[str, Policy]:
    """Return the policies whose bytes are shown, by name."""
    from mesa_tune.policy import Policy

    return {
        "plain": Policy(()),
        **{f"at {bits} bits": Policy.uniform(level=2**bits) for bits in (8, 4)},
    }


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
    for name, policy in list(_policies().items())[1:]:
        predicted = profiled.predict(policy)
        saved, peak = format_bytes(predicted.saved_bytes), format_bytes(predicted.peak_bytes)
        lines.append(f"{name:<17}{peak:>8}   (saved activations: {saved})")
    return lines
