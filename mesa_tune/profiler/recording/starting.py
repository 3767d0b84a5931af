"""Start to watch or to record in the process of a script, as the command has asked for in a shared folder."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from mesa_tune.files import dump_json, write_atomically
from mesa_tune.profiler.profile import Profile
from mesa_tune.profiler.recording.recorder import Recorder
from mesa_tune.profiler.watching.watcher import Watcher

SETTINGS, RESULT, RECORDED = "settings.json", "profile.json", "recorded"
FAULT, ENDED = "fault.txt", "ended.txt"
"""Files in the folder that a command and its script share. `recorded`: the model file is complete.
`fault.txt`: why no step will be observed; `ended.txt`: the same, of a process that has ended.
"""


def start(folder: Path, module: nn.Module) -> None:
    """Watch this process, in which a call of `module` has begun, and write what is found to `folder`."""
    settings = json.loads((folder / SETTINGS).read_text("utf-8"))

    def finish(result: Profile | str) -> None:
        if isinstance(result, Profile):
            write(RESULT, dump_json(result.to_dict()))
        elif result:
            write(ENDED if watcher.exiting else FAULT, result)
        else:
            write(RECORDED, result)

    def write(name: str, text: str) -> None:
        if not any((folder / done).exists() for done in (RESULT, RECORDED)):
            write_atomically(folder / name, text)

    given, name = (settings["script"], settings["steps"]), settings["model"]
    watcher = Watcher(*given, finish) if name is None else Recorder(*given, folder, name, finish)
    watcher.start(module)
