"""Run somebody's training script as it is, and take the profile of the step that is observed inside it.

What is hard: the script may be started by others (torchrun, accelerate), and may train for hours. So a folder
at the front of PYTHONPATH starts the watcher in every Python process. The result is shown as soon as it is
there, and the script goes on.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mesa_tune.errors import RunError
from mesa_tune.files import dump_json

if TYPE_CHECKING:
    from mesa_tune.profiler.profile import Profile

_POLL_S = 0.1
_PATIENCE_S = 20.0


def observe(
    command: list[str], *, steps: int, stop: bool, show: Callable[[Profile], None], quiet_stdout: bool
) -> None:
    """Run `command`, and call `show` with the profile of its step number `steps` when it is observed.

    `stop`: then end the command. `quiet_stdout`: what it prints goes to standard error. Raise RunError if it
    cannot be started, fails, or ends before a step was observed.
    """
    if steps < 2:
        raise RunError(f"--steps {steps}: must be 2 or more\nthe first step shows what the script does")
    with tempfile.TemporaryDirectory(prefix="mesa-tune-") as name:
        folder = Path(name)
        _prepare(folder, command, steps)
        _Script(folder, command, quiet_stdout).run(show, stop)


def _prepare(folder: Path, command: list[str], steps: int) -> None:
    from mesa_tune.profiler.watching import bootstrap, watcher

    shutil.copyfile(bootstrap.__file__, folder / "sitecustomize.py")
    settings = dump_json({"script": shlex.join(command), "steps": steps})
    (folder / watcher.SETTINGS).write_text(settings, "utf-8")


class _Script:
    def __init__(self, folder: Path, command: list[str], quiet_stdout: bool) -> None:
        self.folder, self.command = folder, command
        paths = [str(folder), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        try:
            self.process = subprocess.Popen(
                command, env=environment, stdout=sys.stderr.fileno() if quiet_stdout else None
            )
        except OSError as error:
            raise RunError(
                f"{command[0]}: cannot be run: {error.strerror}\n"
                "write the command as in a shell: mesa-tune profile -- python train.py"
            ) from error

    def run(self, show: Callable[[Profile], None], stop: bool) -> None:
        """Wait for the command; call `show` once."""
        profile: Profile | None = None
        status: int | None = None
        try:
            while status is None:
                status = self._waited(_POLL_S)
                if profile is None and (profile := self._result()) is not None:
                    show(profile)
                    if stop and status is None:
                        self._end()
                        status = 0
        finally:
            if status is None:
                self._waited(_PATIENCE_S)  # Ctrl-C has reached the script, too
                self._end()
        if status:
            raise RunError(
                f"`{shlex.join(self.command)}` ended with status {status}\nits own output says why"
            )
        if profile is None:
            raise RunError(self._fault())

    def _waited(self, seconds: float) -> int | None:
        """Return the status of the command; None if it has not ended within `seconds`."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _end(self) -> None:
        self.process.terminate()
        if self._waited(_PATIENCE_S) is None:
            self.process.kill()
            self.process.wait()

    def _result(self) -> Profile | None:
        from mesa_tune.profiler.profile import Profile
        from mesa_tune.profiler.watching import watcher

        path = self.folder / watcher.RESULT
        return Profile.load(path) if path.exists() else None

    def _fault(self) -> str:
        from mesa_tune.profiler.watching import watcher

        path = self.folder / watcher.FAULT
        if path.exists():
            return path.read_text("utf-8")
        return (
            "no step was observed: the script ended before enough steps of a torch.optim optimizer, or it "
            "compiles its model\n"
            "let it run longer, observe an earlier step with --steps 2, or set TORCH_COMPILE_DISABLE=1"
        )
