"""`mesa-tune profile`: measure what the activations of each layer cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mesa_tune.commands.bytes_only import Request, profile_bytes, replacing_bytes
from mesa_tune.commands.common import (
    DebugOption,
    DeviceOption,
    ForceOption,
    JsonOption,
    Output,
    QuietOption,
    Run,
    RunOption,
    below,
    digest,
    dump_json,
    format_bytes,
    format_table,
    format_time,
    noted,
)
from mesa_tune.commands.guide.advice import UNRECORDED, advice, find_reach, has_prices, next_command
from mesa_tune.errors import RunError, WorkloadError

if TYPE_CHECKING:
    from mesa_tune.profiles.profile import Profile
    from mesa_tune.workload.workload import Workload

ModelArgument = Annotated[
    str, typer.Argument(metavar="model.py", help="File with model(), batch(), loss(); or hf:CONFIG.")
]
CommandArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- COMMAND",
        help="In place of model.py: a script as it is, of which a step is observed.",
        show_default=False,
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option("--steps", metavar="N", help="Of a script: observe step N. Default: 3; at least 2."),
]
StopOption = Annotated[bool, typer.Option("--stop", help="End the script when its step is recorded.")]
BatchOption = Annotated[
    int | None, typer.Option("--batch-size", metavar="N", help="Default: the file's BATCH_SIZE.")
]
AutocastOption = Annotated[
    str | None, typer.Option("--autocast", metavar="bfloat16|none", help="Default: the file's AUTOCAST.")
]
FastOption = Annotated[bool, typer.Option("--fast", help="One group size and one batch: a first look.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="S",
        min=1,
        help="After S seconds measure only what a profile cannot do without.",
    ),
]
BytesOnlyOption = Annotated[
    bool, typer.Option("--bytes-only", help="Bytes and peak alone: allocates no model, runs no step.")
]
LengthOption = Annotated[
    int | None,
    typer.Option("--length", metavar="L", min=1, help="Tokens per sample. Default: the file's LENGTH."),
]
LoraOption = Annotated[
    int | None,
    typer.Option("--lora", metavar="RANK", min=1, help="Adapters on all linear layers, for hf:CONFIG."),
]
FitsOption = Annotated[
    str | None,
    typer.Option(
        "--fits", metavar="24GB", help="With --bytes-only: does the step fit, at which batch sizes."
    ),
]

_MAX_ROWS = 12
_HEADER = ("layer", "tag", "saves", "error at 4 bits")


def profile(
    model: ModelArgument,
    command: CommandArgument = None,
    batch_size: BatchOption = None,
    device: DeviceOption = None,
    autocast: AutocastOption = None,
    fast: FastOption = False,
    timeout: TimeoutOption = None,
    bytes_only: BytesOnlyOption = False,
    length: LengthOption = None,
    lora: LoraOption = None,
    fits: FitsOption = None,
    steps: StepsOption = None,
    stop: StopOption = False,
    run: RunOption = Path("mesa-run"),
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    force: ForceOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure what each layer saves, and what fewer bits would do."""
    from mesa_tune.workload.workload import Workload

    output = Output(json=as_json, quiet=quiet)
    folder = Run(run, force=force)
    measure = partial(_measure, fast=fast, timeout=timeout, folder=folder, output=output)
    if command:
        measured: dict[str, object] = {"--batch-size": batch_size, "--device": device, "--autocast": autocast}
        measured |= {"--bytes-only": bytes_only, "--length": length, "--lora": lora, "--fits": fits}
        _refuse(measured, "the script itself says that: leave it out, or change it there")
        path = _observe([model, *command], 3 if steps is None else steps, stop, folder, output)
        if path is not None:
            measure(Workload.load(path), inputs=_script([model, *command]))
        return
    _refuse({"--steps": steps, "--stop": stop}, "only a script has it: mesa-tune profile -- python train.py")
    request = Request(model, batch_size, length, device, autocast, fits, lora)
    request.check(bytes_only=bytes_only, fast=fast)
    if bytes_only:
        _refuse({"--timeout": timeout}, "--bytes-only runs no step that could take time: leave it out")
        profile_bytes(request, folder, output)
        return
    measure(Workload.load(model, batch_size=batch_size, device=device, autocast=autocast))


def _script(command: list[str]) -> str:
    """Return the inputs of the profile of a script: the same command measures it anew."""
    return digest("script", command)


def _measure(
    workload: Workload,
    *,
    fast: bool,
    timeout: float | None,
    folder: Run,
    output: Output,
    inputs: str | None = None,
) -> None:
    """Measure bytes and prices, write the profile, and show it. `inputs`: default those of the workload."""
    from mesa_tune.measure.profiling import SEEDS
    from mesa_tune.measure.profiling import profile as measure
    from mesa_tune.profiles.entries import fast_grid, full_grid

    output.device(workload.device)
    output.line(f"profiling {workload.path} at batch size {workload.batch_size}")
    options, seeds = (fast_grid(), 1) if fast else (full_grid(), SEEDS)
    origin = replacing_bytes(folder, inputs or digest("profile", workload.description, fast))
    folder.check(folder.profile, origin)
    try:
        profiled = measure(
            workload,
            options=options,
            seeds=seeds,
            path=folder.profile,
            timeout=timeout,
            progress=lambda text, share: output.status(f"{share:4.0%} {text}"),
            enough=_announcing(output, seeds, len(options)),
            save=lambda partial: folder.write(folder.profile, dump_json(partial.to_dict()), origin),
        )
    finally:
        output.status("")
    for line in _lines(profiled, folder):
        output.line(line)
    output.document("profile", profiled.to_dict())


def _announcing(output: Output, batches: int, options: int) -> Callable[[Profile], bool]:
    """Return what says how long the rest of a profile takes, to be called when its steps have been traced."""
    from mesa_tune.measure.timing.duration import announcing

    announce = announcing(output.line, batches, options)

    def enough(traced: Profile) -> bool:
        if not output.json:
            announce(traced.step_ms or 0.0)
        return False

    return enough


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raise RunError if one of `options` was given."""
    given = [name for name, value in options.items() if value]
    if given:
        raise RunError(f"{', '.join(given)}: not for this profile\n{why}")


def _observe(command: list[str], steps: int, stop: bool, folder: Run, output: Output) -> Path | None:
    """Write and show the bytes of a script's step; return the model file that its steps were recorded in.

    None if they cannot be: then the bytes stay the profile.
    """
    from mesa_tune.commands.init import check, taking
    from mesa_tune.commands.script import observe

    inputs, path = _script(command), folder.folder / "recorded_step.py"
    folder.check(folder.profile, inputs)
    shown: list[Profile] = []

    def show(profiled: Profile) -> None:
        shown.append(profiled)
        folder.write(folder.profile, dump_json(profiled.to_dict()), inputs)
        output.device(profiled.device)
        for line in _lines(profiled, folder):
            output.line(line)
        output.line("prices of policies follow when the script has ended")

    take = taking(path, output)
    why = observe(command, steps=steps, stop=stop, show=show, path=path, take=take, quiet_stdout=output.json)
    try:
        if why is None:
            check(path)
            return path
    except WorkloadError as error:
        why = str(error)
    output.line(f"no prices: {why.splitlines()[0]}")
    output.line(f"next: {UNRECORDED}")
    output.document("profile", shown[0].to_dict())
    return None


def _lines(profiled: Profile, folder: Run) -> list[str]:
    reach = find_reach(profiled)
    largest = sorted(profiled.layers, key=lambda layer: -layer.own_bytes)[:_MAX_ROWS]
    rows = [
        [layer.name, layer.tag, format_bytes(layer.own_bytes), _error(profiled, layer.name)]
        for layer in largest
    ]
    rest = sum(layer.own_bytes for layer in profiled.layers) - sum(layer.own_bytes for layer in largest)
    if rest > 0:
        rows.append([f"{len(profiled.layers) - len(largest)} further layers", "", format_bytes(rest), ""])
    columns = 4 if has_prices(profiled) else 3
    static, plain = format_bytes(profiled.static_bytes), profiled.predict_assignment({})
    return [
        *noted(profiled.notes),
        f"peak of a step   {format_bytes(profiled.peak_bytes):>8}   (weights, optimizer, batch: {static})",
        *below("" if plain.peak is None else plain.peak.text),
        *advice(profiled, reach),
        f"saved activations {format_bytes(profiled.saved_bytes):>7}   in {len(profiled.layers)} layers",
        *_exact(profiled),
        f"a step takes     {format_time(profiled.plain_ms(profiled.batch_size) / 1e3):>8}",
        *_noise(profiled),
        "",
        *format_table(_HEADER[:columns], [row[:columns] for row in rows]),
        "",
        f"wrote {folder.profile}",
        *([] if profiled.script else [f"next: {next_command(profiled, reach, folder)}"]),
    ]


def _exact(profiled: Profile) -> list[str]:
    """Return lines on the bytes of functions that no policy changes, if there are any."""
    from mesa_tune.profiles.entries import REACHED_BY_NONE

    sizes: dict[str, int] = {}
    for entry in profiled.exact:
        if entry.why in REACHED_BY_NONE:
            sizes[entry.function] = sizes.get(entry.function, 0) + entry.bytes
    if not sizes:
        return []
    largest = sorted(sizes, key=lambda name: -sizes[name])
    named = ", ".join(largest[:3]) + (f" and {len(largest) - 3} more" if len(largest) > 3 else "")
    count = sum(sizes.values())
    share = count / profiled.saved_bytes
    return below(f"{format_bytes(count)} ({share:.1%}) of them stay exact under every policy: {named}")


def _noise(profiled: Profile) -> list[str]:
    if profiled.gradient_noise is None:
        return []
    return [
        f"gradient noise   {profiled.gradient_noise:>8.2f}   (variance from batch to batch, over ‖g‖²)",
        *_at_checkpoints(profiled),
    ]


def _at_checkpoints(profiled: Profile) -> list[str]:
    rows = [
        [
            at.checkpoint,
            f"{at.gradient_noise:.2f}",
            f"{at.gradient_error:.1e}",
            _ratio(at.gradient_noise_ratio),
        ]
        for at in profiled.checkpoints
    ]
    header = ["at checkpoint", "noise", "error at 4 bits", "over noise"]
    return ["", *format_table(header, rows)] if rows else []


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _error(profiled: Profile, name: str) -> str:
    from mesa_tune.policy.settings import LayerSettings

    error = profiled.layer_error(profiled.layer(name), LayerSettings(level=16))
    return "" if error is None else f"{error:.1e}"
