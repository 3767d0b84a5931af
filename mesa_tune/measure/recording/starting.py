"""Start to watch or to record in the process of a script, as the command has asked for in a shared folder."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from mesa_tune.files import dump_json, write_atomically
from mesa_tune.measure.recording.recorder import Recorder
from mesa_tune.measure.watching.bootstrap import SETTINGS
from mesa_tune.measure.watching.watcher import Watcher
from mesa_tune.profiles.profile import Profile

RESULT, RECORDED = "profile.json", "recorded"
FAULT, ENDED, UNRECORDED = "fault.txt", "ended.txt", "unrecorded.txt"
"""Files in the folder that a command and its script share. `recorded`: the model file is complete.
`fault.txt`: why no step will be observed; `ended.txt`: the same, of a process that has ended.
`unrecorded.txt`: why there is no model file of a step that was observed.
"""


def start(folder: Path, module: nn.Module) -> None:
    """Watch this process, in which a call of `module` has begun, and write what is found to `folder`."""
    settings = json.loads((folder / SETTINGS).read_text("utf-8"))
    script, observed = settings["script"], settings["steps"]

    def finish(result: Profile | str) -> None:
        if (folder / RESULT).exists() or (folder / RECORDED).exists():
            return  # of another process
        if isinstance(result, Profile):
            write_atomically(folder / RESULT, dump_json(result.to_dict()))
        else:
            write_atomically(folder / (ENDED if watcher.exiting else FAULT), result)

    def recorded(failure: str) -> None:
        if failure and observed is None:
            finish(failure)
        else:
            write_atomically(folder / (UNRECORDED if failure else RECORDED), failure)

    recorder = Recorder(script, settings["batches"], folder, Path(settings["path"]), recorded)
    watcher = recorder if observed is None else Watcher(script, observed, finish, recorder.follow)
    watcher.start(module)
