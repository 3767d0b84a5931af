"""A PostgreSQL server of the tests' own: on loopback, in a temporary folder, with a password."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

PASSWORD = "s3kret/:@ 40%{x}"
_USER = "postgres"


def programs() -> Path | None:
    """Return the folder of `initdb` and `postgres`; None where there is none."""
    path = shutil.which("initdb")
    folders = [Path(path).resolve().parent] if path else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "postgres").is_file()), None)


class Server:
    """A server, stopped until `start`. Its processes end with `close`."""

    def __init__(self) -> None:
        folder = programs()
        assert folder is not None
        self.programs = folder
        self.folder = Path(tempfile.mkdtemp(prefix="mesa-pg-"))
        # The server refuses to run as root.
        self.user = _USER if os.geteuid() == 0 else None
        (self.folder / "password").write_text(PASSWORD, "utf-8")
        if self.user:
            for path in (self.folder, self.folder / "password"):
                shutil.chown(path, self.user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = ["-A", "scram-sha-256", "-U", "mesa", f"--pwfile={self.folder / 'password'}", "-N"]
        self._run("initdb", "-D", str(self.folder / "data"), *options).wait()
        (self.folder / "password").unlink()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.url_of(PASSWORD)

    def url_of(self, password: str) -> str:
        """Return the URL with this password."""
        return f"postgresql+psycopg://mesa:{quote(password, safe='')}@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = ["-p", str(self.port), "-c", "listen_addresses=127.0.0.1", "-k", str(self.folder), "-F"]
        self.process = self._run("postgres", "-D", str(self.folder / "data"), *options)
        end = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < end
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server at once, as a crash does: open transactions are lost."""
        assert self.process is not None
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait()

    def close(self) -> None:
        """Stop the server and delete its folder."""
        self.stop()
        shutil.rmtree(self.folder)

    def _answers(self) -> bool:
        import psycopg

        try:
            with psycopg.connect(
                host="127.0.0.1", port=self.port, user="mesa", password=PASSWORD, dbname="postgres"
            ):
                return True
        except psycopg.OperationalError:
            return False

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [str(self.programs / program), *arguments],
                stdout=log,
                stderr=log,
                user=self.user,
                cwd=self.folder,
                start_new_session=True,
            )
