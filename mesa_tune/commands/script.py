"""Run somebody's training script as it is, and take what is observed inside it: a profile, or a model file.

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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mesa_tune.errors import RunError
from mesa_tune.files import dump_json
from mesa_tune.notice import say

if TYPE_CHECKING:
    from mesa_tune.profiles.profile import Profile

T = TypeVar("T")

_WATCHER = "mesa_tune.measure.recording.starting"
_BATCHES = 32
"""A profile measures the gradient noise on so many batches, and repeats them if there are fewer."""
_POLL_S = 0.1
_SOON_S = 5.0
_PATIENCE_S = 20.0
_NOTHING_CALLED = (
    "no step was observed: the script called no module with gradients, or compiled ones alone\n"
    "let it train; set TORCH_COMPILE_DISABLE=1 if it compiles its model"
)


def observe(
    command: list[str],
    *,
    steps: int,
    stop: bool,
    show: Callable[[Profile], None],
    path: Path,
    take: Callable[[Path], None],
    quiet_stdout: bool,
) -> str | None:
    """Run `command`, and call `show` with the profile of its step number `steps` when it is observed.

    Record further steps, and when it has ended call `take` as `record` does; or return why no model file was
    written. `stop`: end the command when its steps are recorded, or cannot be. `quiet_stdout`: what it prints
    goes to standard error. Raise RunError if it cannot be started, fails, or ends before a step was observed.
    That no step will be is said at once.
    """
    from mesa_tune.measure.recording.starting import RECORDED, UNRECORDED

    if steps < 2:
        raise RunError(f"--steps {steps}: must be 2 or more\nthe first step shows what the script does")

    def result(folder: Path) -> Profile | None:
        from mesa_tune.measure.recording.starting import RESULT
        from mesa_tune.profiles.profile import Profile

        return Profile.load(folder / RESULT) if (folder / RESULT).exists() else None

    with _shared_folder(_WATCHER, _recording(shlex.join(command), steps, path)) as folder:
        recorded, unrecorded = folder / RECORDED, folder / UNRECORDED
        script = _Script(folder, command, quiet_stdout)
        script.run(result, show, stop, lambda: recorded.exists() or unrecorded.exists())
        if not recorded.exists():
            return _text(unrecorded) or "the script ended with the observed step\nlet it run longer"
        take(folder)
        return None


def record(
    command: list[str], about: str, *, path: Path, take: Callable[[Path], None], quiet_stdout: bool
) -> None:
    """Run `command` until 32 steps after the first are recorded, and end it.

    Call `take` with the folder of the model file, which names the script as `about`, and the files beside
    it, to be moved to `path`. Raise RunError as `observe` does, and for a step that no model file can
    describe.
    """

    def result(folder: Path) -> Path | None:
        from mesa_tune.measure.recording.starting import RECORDED

        return folder if (folder / RECORDED).exists() else None

    with _shared_folder(_WATCHER, _recording(about, None, path)) as folder:
        _Script(folder, command, quiet_stdout).run(result, take, stop=True)


def explain(command: list[str]) -> int:
    """Run `command`, whose processes explain what their step takes if memory runs out; return its status.

    Raise RunError if it cannot be started.
    """
    with _shared_folder("mesa_tune.estimation.oom", {}) as folder:
        return _Script(folder, command, quiet_stdout=False).status()


def _recording(script: str, steps: int | None, path: Path) -> dict[str, Any]:
    """Return settings of the watcher. `steps`: the step to observe; `path`: of the model file to record."""
    return {"script": script, "steps": steps, "path": str(path.resolve()), "batches": _BATCHES}


@contextmanager
def _shared_folder(starts: str, settings: dict[str, Any]) -> Iterator[Path]:
    """Yield a folder at the front of the script's PYTHONPATH; see `bootstrap`."""
    from mesa_tune.measure.watching import bootstrap
    from mesa_tune.measure.watching.bootstrap import SETTINGS

    with tempfile.TemporaryDirectory(prefix="mesa-tune-") as name:
        folder = Path(name)
        shutil.copyfile(bootstrap.__file__, folder / "sitecustomize.py")
        (folder / SETTINGS).write_text(dump_json({"starts": starts, **settings}), "utf-8")
        yield folder


class _Script:
    def __init__(self, folder: Path, command: list[str], quiet_stdout: bool) -> None:
        from mesa_tune.measure.recording.starting import ENDED, FAULT

        self.folder, self.command = folder, command
        self.fault, self.ended, self.told = folder / FAULT, folder / ENDED, False
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

    def run(
        self,
        result: Callable[[Path], T | None],
        show: Callable[[T], None],
        stop: bool,
        is_complete: Callable[[], bool] = lambda: True,
    ) -> None:
        """Wait for the command; call `show` once, with the result in the folder when there is one.

        `stop`: end the command when that is shown, and all `is_complete`.
        """
        found: T | None = None
        status: int | None = None
        try:
            while status is None:
                status = self._waited(_POLL_S)
                if found is None and (found := result(self.folder)) is not None:
                    show(found)
                if found is not None and stop and is_complete():
                    self._end()
                    return
                if found is None and status is None and self._has_failed(stop):
                    status = 0
        finally:
            if status is None:
                self._waited(_PATIENCE_S)  # Ctrl-C has reached the script, too
                self._end()
        self._require_success(status, found is not None)

    def status(self) -> int:
        """Wait for the command, and return its status."""
        try:
            return self.process.wait()
        finally:
            self._end()  # Ctrl-C has reached the script, too

    def _require_success(self, status: int | None, found: bool) -> None:
        if status:
            before = "" if found else " before a step was observed"
            raise RunError(
                f"`{shlex.join(self.command)}` ended with status {status}{before}\nits own output says why"
            )
        if not found:
            raise RunError(_text(self.fault) or _text(self.ended) or _NOTHING_CALLED)

    def _has_failed(self, stop: bool) -> bool:
        """Return whether the script was ended, as no step can be observed; without `stop`, say so once."""
        fault = _text(self.fault)
        if fault is None or time.time() - self.fault.stat().st_mtime < _SOON_S:
            return False  # the script may be about to end, with a status of its own
        if stop:
            self._end()
        elif not self.told:
            self.told = True
            say(f"{fault.splitlines()[0]}; the script goes on, unobserved")
        return stop

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


def _text(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None
