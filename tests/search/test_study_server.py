"""Studies on PostgreSQL: several workers, a killed one, a server that goes away, and passwords."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, quote_plus

import optuna
import pytest

from mesa_tune import profile
from mesa_tune.errors import RunError
from mesa_tune.search.study import storage
from mesa_tune.search.study.address import Address
from mesa_tune.workload.workload import Workload
from tests.commands.test_search_command import MODEL, OPTIONS
from tests.search.meters import Stopped, Weighted
from tests.search.postgres import PASSWORD, Server, programs
from tests.search.workers import (
    PROFILE,
    WEIGHTS,
    assert_none_is_repeated,
    child,
    done,
    ended,
    join,
    plan,
    wait_for,
)
from tests.synthetic import COARSE, synthetic_profile

pytestmark = pytest.mark.slow("server")
needs_server = pytest.mark.skipif(programs() is None, reason="no initdb: apt-get install postgresql")
_SECRETS = {PASSWORD, quote(PASSWORD, safe=""), quote(PASSWORD), quote_plus(PASSWORD)}


@pytest.fixture(scope="module", name="server")
def _server() -> Iterator[Server]:
    server = Server()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(name="url")
def _url(server: Server) -> str:
    """The URL of the server, which has no study."""
    for name in optuna.get_all_study_names(_stored(server.url)):
        optuna.delete_study(study_name=name, storage=_stored(server.url))
    return server.url


def _stored(url: str) -> optuna.storages.RDBStorage:
    # Optuna takes the URL for a template.
    return optuna.storages.RDBStorage(url.replace("{", "{{").replace("}", "}}"))


@needs_server
def test_a_killed_workers_trial_is_another_workers(url: str) -> None:
    count = 14
    begun = child(plan, count, url, Weighted(PROFILE, WEIGHTS, seconds=0.1))
    wait_for(lambda: done(_stored(url)))
    killed = child(join, url, Stopped(PROFILE, WEIGHTS, pair=1, kills=True))
    joined = child(join, url, Weighted(PROFILE, WEIGHTS, seconds=0.1))
    assert ended(killed) == -signal.SIGKILL
    assert (ended(begun), ended(joined)) == (0, 0)
    trials = done(_stored(url))
    assert count <= len(trials) <= count + 2
    assert_none_is_repeated(trials)


@needs_server
def test_a_lost_trial_is_enqueued_again_when_another_starts(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_BEAT", 1)
    monkeypatch.setattr(storage, "_SILENCE", 2)
    assert ended(child(plan, 4, url, Stopped(PROFILE, WEIGHTS, pair=13, kills=True))) == -signal.SIGKILL
    time.sleep(3)
    assert plan(6, url).trials == 6
    [lost] = [trial for trial in _trials(url) if trial.state.name == "FAIL"]
    again = [trial for trial in done(_stored(url)) if trial.params == lost.params]
    assert len(again) == 1
    assert again[0].user_attrs.get("failed_trial", again[0].system_attrs.get("failed_trial")) == lost.number


@needs_server
def test_a_server_that_goes_away_ends_workers_and_the_same_command_goes_on(
    server: Server, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = Weighted(PROFILE, WEIGHTS, seconds=0.2)
    begun = child(plan, 1000, url, slow)
    wait_for(lambda: done(_stored(url)))
    joined = child(join, url, slow)
    wait_for(lambda: len(done(_stored(url))) >= 4)
    before = {trial.number for trial in done(_stored(url))}
    server.stop()
    time.sleep(5)
    assert (ended(begun), ended(joined)) == (3, 3)
    said = capfd.readouterr().err.splitlines()
    assert len(said) <= 2 * 3
    assert not any(secret in line for secret in _SECRETS for line in said)
    server.start()
    count = len(before) + 4
    assert plan(count, url).trials >= count
    assert before <= {trial.number for trial in done(_stored(url))}


def _trials(url: str) -> list[optuna.trial.FrozenTrial]:
    [name] = optuna.get_all_study_names(_stored(url))
    return list(optuna.load_study(study_name=name, storage=_stored(url)).trials)


@needs_server
def test_strangers_are_refused_in_one_line(
    server: Server, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plan(2, url)
    other = synthetic_profile(3, grid=COARSE, seed=2)
    from mesa_tune.search.study.study import Work, join_search

    def refused(words: str, study: str = "mesa-tune", to: str = url, of: object = PROFILE) -> None:
        with pytest.raises(RunError, match=words) as caught:
            join_search(of, study, Work(to, None, None), lambda _: Weighted(PROFILE))  # type: ignore[arg-type]
        assert len(str(caught.value).splitlines()) <= 3
        assert not any(secret in str(caught.value) for secret in _SECRETS)

    refused("another profile of this model", of=other)
    refused("no such study", study="nobody")
    refused("password authentication failed", to=server.url_of("wrong"))
    refused("Connection refused", to=server.url.replace(str(server.port), "1"))
    optuna.create_study(study_name="theirs", storage=_stored(url))
    refused("not a study of mesa-tune search", study="theirs")
    plan(1, url, seed=5)
    refused("2 studies begin so")
    # Neither Optuna nor SQLAlchemy says anything of its own.
    assert capfd.readouterr() == ("", "")


@needs_server
def test_the_password_is_nowhere(server: Server, url: str, tmp_path: Path) -> None:
    """Run the real command with two workers, and look at all that others can see."""
    (tmp_path / "model.py").write_text(MODEL, "utf-8")
    workload = Workload.load(tmp_path / "model.py", device="cpu")
    profile(workload, options=OPTIONS, seeds=2).save(tmp_path / "mesa-run" / "profile.json")
    command = [sys.executable, "-m", "mesa_tune", "search", "--budget", "80%", "--trials", "6"]
    seen = set()
    with (tmp_path / "output").open("wb") as output:
        running = subprocess.Popen(
            [*command, "--workers", "2"],
            cwd=tmp_path,
            env={**os.environ, "MESA_TUNE_STORAGE": url, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )
        while running.poll() is None:
            seen |= _titles()
            time.sleep(0.05)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert running.returncode == 0, (tmp_path / "output").read_text("utf-8")
    assert any(b"multiprocessing" in title for title in seen)
    trials = _trials(url)
    assert len(done(_stored(url))) >= 6
    [study] = _stored(url).get_all_studies()
    stored = [study.user_attrs, study.system_attrs, *(vars(trial) for trial in trials)]
    everything = b"\n".join([*seen, *written, *(str(values).encode() for values in stored)])
    assert not [secret for secret in _SECRETS if secret.encode() in everything]


def _titles() -> set[bytes]:
    """Return the command lines and names of all processes."""
    titles = set()
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "comm"):
            with suppress(OSError):  # it has ended
                titles.add((process / name).read_bytes())
    return titles


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me:{}@host:5/db",
        "postgresql+psycopg://me@host/db?password={}&sslmode=require",
        "mysql://me:{}@host/db",
    ],
)
def test_an_address_is_shown_without_its_password(url: str) -> None:
    written = url.format(quote(PASSWORD, safe=""))
    address = Address.of(written)
    assert address.is_shared
    assert "host" in address.shown
    assert "me" not in address.shown.replace("@", " ").split()
    said = f"cannot connect to {written} with {PASSWORD} or {quote_plus(PASSWORD)}"
    for text in (address.shown, address.cleaned(said)):
        assert not any(secret in text for secret in _SECRETS)


@pytest.mark.parametrize(
    "url", ["postgresql:/me:secret@host/db", "postgresql//me:secret@h", "x://me:secret@h:p/d"]
)
def test_a_url_with_a_slip_is_refused_without_its_password(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError) as caught:
        plan(2, url)
    assert "secret" not in str(caught.value)
    assert "postgresql+psycopg://" in str(caught.value)
    assert caught.value.__cause__ is None
    assert not list(tmp_path.iterdir())


def test_a_missing_driver_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(RunError) as caught:
        plan(2, "postgresql+psycopg://me:secret@127.0.0.1:1/db")
    assert 'pip install "mesa-tune[postgresql]"' in str(caught.value).splitlines()[1]
    assert "secret" not in str(caught.value)
