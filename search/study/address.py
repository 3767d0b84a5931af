"""The address of a study's storage: the path of a SQLite file, `journal:PATH`, or the URL of a database.

The hard part: a URL can have a password, and drivers and SQLAlchemy quote URLs in their errors. So an address
is shown without user, password and query, and every text that may quote it is cleaned of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from mesa_tune.errors import RunError

_JOURNAL = re.compile(r"journal:(//(?=/))?")
_SECRET = re.compile("pass|pwd|secret|token|key", re.IGNORECASE)
_HIDDEN = "…"
_EXAMPLE = "give a path, journal:PATH, or a URL such as postgresql+psycopg://USER@HOST/DATABASE"


@dataclass(frozen=True)
class Address:
    """Where a study is stored: `kind` is memory, sqlite, journal or server.

    `path`: of the SQLite file or the journal; None for a server and for memory. `url`: of a database.
    """

    kind: str
    shown: str
    path: Path | None = None
    url: str | None = None
    secrets: tuple[str, ...] = ()

    @staticmethod
    def of(storage: str | Path | None) -> Address:
        """Return the address that a user wrote. Raise RunError for what is neither a path nor a URL."""
        if storage is None:
            return Address("memory", "memory")
        text = str(storage)
        if journal := _JOURNAL.match(text):
            path = Path(text[journal.end() :])
            if not path.name:
                raise RunError(f"{text}: names no file\n{_EXAMPLE}")
            return Address("journal", text, path)
        if "://" in text:
            return _of_url(text)
        if "@" in text and ":" in text:  # a URL with a slip, and perhaps with a password
            raise RunError(f"storage: neither a path nor a URL\n{_EXAMPLE}")
        return Address("sqlite", text, Path(text), f"sqlite:///{text}")

    @property
    def is_shared(self) -> bool:
        """Return True if several processes may work on the study at once."""
        return self.kind in {"journal", "server"}

    def cleaned(self, text: str) -> str:
        """Return `text` without the URL's password and other secrets."""
        for secret in self.secrets:
            text = text.replace(secret, _HIDDEN)
        return text


def _of_url(text: str) -> Address:
    from sqlalchemy.engine import URL, make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise RunError(f"storage: not a URL\n{_EXAMPLE}") from None
    bare = URL.create(url.drivername, host=url.host, port=url.port, database=url.database).render_as_string()
    has_user = url.username is not None or url.password is not None
    shown = bare.replace("://", f"://{_HIDDEN}@", 1) if has_user else bare
    if url.get_backend_name() != "sqlite":
        return Address("server", shown, None, text, tuple(_secrets(text, url)))
    path = None if url.database in {None, "", ":memory:"} else Path(str(url.database))
    return Address("memory" if path is None else "sqlite", shown, path, text, tuple(_secrets(text, url)))


def _secrets(text: str, url: Any) -> Iterator[str]:
    """Yield the URL, its password, and what looks like one in its query, as written and as meant."""
    yield text
    values = [url.password, *(value for key, value in url.query.items() if _SECRET.search(key))]
    meant = [part for value in values if value for part in ([value] if isinstance(value, str) else value)]
    forms = {form for part in meant for form in (part, quote(part), quote(part, safe=""), quote_plus(part))}
    yield from sorted(forms, key=len, reverse=True)
