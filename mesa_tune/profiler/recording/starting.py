"""Start to watch or to record in the process of a script, as the command has asked for in a shared folder."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from mesa_tune.files import dump_json, write_atomically
from mesa_tune.profiler.profile import Profile
from mesa_tune.profiler.recording.recorder import Recorder
from mesa_tune.profiler.watching.watcher import Watcher

SETTINGS, RESULT, FAULT, RECORDED = "settings.json", "profile.json", "fault.txt", "recorded"
"""Files in the folder that a command and its script share; `recorded`: the model file is complete."""


def start(folder: Path, module: nn.Module) -> None:
    """Watch this process, in which a call of `module` has begun, and write what is found to `folder`."""
    settings = json.loads((folder / SETTINGS).read_text("utf-8"))

    def finish(result: Profile | str) -> None:
        if not (folder / RESULT).exists():
            text = result if isinstance(result, str) else dump_json(result.to_dict())
            write_atomically(folder / (FAULT if isinstance(result, str) else RESULT), text)

    def recorded(fault: str) -> None:
        if not (folder / RECORDED).exists():
            write_atomically(folder / (FAULT if fault else RECORDED), fault)

    script, steps, name = settings["script"], settings["steps"], settings["model"]
    if name is None:
        Watcher(script, steps, finish).start(module)
    else:
        Recorder(script, steps, folder, name, recorded).start(module)
