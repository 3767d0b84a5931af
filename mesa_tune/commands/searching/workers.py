"""Local processes that work on the study of this command.

They are spawned, so they get the storage's URL through a pipe: no password is in a command line. They end
with the study and with the command, also with a command that was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from mesa_tune.commands.common import Run, load_workload
from mesa_tune.errors import MesaTuneError, RunError

if TYPE_CHECKING:
    from mesa_tune.search.study.study import Joined, Sharing


@dataclass(frozen=True)
class Job:
    """What a worker needs: the study's storage, the run's folder, the profile, and the study's length."""

    storage: str
    folder: Path
    profile: Path
    trials: int | None
    timeout: float | None
    threads: int


def threads_each(workers: int) -> int:
    """Return how many of torch's threads each worker gets."""
    import torch

    return max(1, torch.get_num_threads() // workers)


def storage_of(run: Run, storage: str | None, workers: int) -> str | None:
    """Return the storage of a study with so many workers: of several, a journal in the run's folder.

    None for one worker without a storage: the run's own file. Raise RunError for a number of workers that is
    none, and for several where SQLite is the storage.
    """
    from mesa_tune.search.study.address import Address
    from mesa_tune.search.study.storage import require_shared

    if workers < 1:
        raise RunError(f"workers {workers}: must be 1 or more\n1 is this process alone")
    if workers > 1 and storage is None:
        return f"journal:{run.folder / 'study.journal'}"
    if workers > 1:
        require_shared(Address.of(storage))
    return storage


def sharing(job: Job, others: int, begun: Callable[[str], None]) -> Sharing:
    """Return the context in which `others` further processes work on the study with the name given.

    `begun`: called with this name before.
    """

    @contextmanager
    def running(study: str) -> Iterator[None]:
        begun(study)
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=_work, args=(study, job), daemon=True) for _ in range(others)]
        for process in processes:
            process.start()
        try:
            yield
        except BaseException:
            for process in processes:
                process.terminate()
            raise
        finally:
            for process in processes:
                process.join()

    return running


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the signal that ends a job (SIGTERM) stop the body as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _work(study: str, job: Job) -> None:
    """Work on the study in a process of its own."""
    from mesa_tune.workload.user_code import is_out_of_memory, unexplained

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command decides what Ctrl-C stops
    _end_with_the_command()
    try:
        with interruptible():
            join(study, job)
    except KeyboardInterrupt:
        sys.exit(130)
    except (MesaTuneError, OSError) as error:
        print(f"warning: a worker stopped: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - the command has no traceback of another process
        why = "out of memory\ntake fewer --workers" if is_out_of_memory(error) else unexplained(error)
        print(f"warning: a worker stopped: {why}", file=sys.stderr, flush=True)
        sys.exit(1)


def join(
    study: str, job: Job, sharing: Sharing | None = None, progress: Callable[[str], None] | None = None
) -> Joined:
    """Work on the study until it has its length, and return what was done."""
    import torch

    from mesa_tune.measure.fake_steps import PolicyTracer
    from mesa_tune.measure.timing.step_meter import StepMeter, measuring
    from mesa_tune.profiles.profile import Profile
    from mesa_tune.search.study.study import Work, join_search

    torch.set_num_threads(job.threads)
    profile = Profile.load(job.profile)
    workload = load_workload(Run(job.folder), profile, "--join measures gradients, so it needs the model")
    work = Work(job.storage, job.trials, job.timeout, progress, sharing)
    with ExitStack() as stack:

        def measure(batch_size: int) -> StepMeter:
            return stack.enter_context(measuring(profile, PolicyTracer.of(workload, profile, batch_size)))

        return join_search(profile, study, work, measure)


def _end_with_the_command() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=watch, daemon=True).start()
