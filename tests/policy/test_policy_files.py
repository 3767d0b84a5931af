"""Policy.load and Policy.save: clear errors, whole files, and nobody's edits lost."""

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from mesa_tune.errors import PolicyError
from mesa_tune.policy import Policy
from mesa_tune.policy.policy import Header

POLICY = Policy(Policy.uniform(16).rules, Header(model="vit", fingerprint="8f3c0a11d2e4b5c6"))
OTHER = Policy.uniform(4)
MESA = Policy.parse("on fc:\n  by_index: all\n  enable: True\n")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "policy.txt"


@pytest.mark.parametrize("policy", [POLICY, MESA, Policy()], ids=["ours", "mesa", "empty"])
def test_what_was_saved_loads_equal(policy: Policy, path: Path) -> None:
    policy.save(path)
    again = Policy.load(path)
    assert again == policy
    assert (again.header, again.is_mesa) == (policy.header, policy.is_mesa)
    assert (again.warnings, again.source) == ((), str(path))


def test_a_saved_file_begins_with_our_first_line_and_header(path: Path) -> None:
    POLICY.save(path)
    lines = path.read_text().splitlines()
    assert lines[:2] == ["# mesa-tune policy 1", "# model vit (layers 8f3c0a11d2e4b5c6)"]
    assert lines[2].startswith("# checksum ")
    assert lines[3] == "on fc:"


EDITS: dict[str, Callable[[bytes], bytes]] = {
    "value-changed": lambda text: text.replace(b"level: 16", b"level: 17", 1),
    "comment-added": lambda text: text + b"# mine\n",
    "checksum-removed": lambda text: re.sub(b"# checksum .*\n", b"", text),
    "checksum-changed": lambda text: text.replace(b"# checksum ", b"# checksum 0", 1),
    "not-ours": lambda text: b"on fc:\n",
    "not-a-policy": lambda text: b"dear diary\n",
    "binary": lambda text: b"\xff\xfe\x00",
    "emptied": lambda text: b"",
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_or_foreign_file_is_kept_unless_forced(edit: str, path: Path) -> None:
    POLICY.save(path)
    before = EDITS[edit](path.read_bytes())
    path.write_bytes(before)
    with pytest.raises(PolicyError, match=r"edited or is not a policy of mesa-tune's\n.*force=True"):
        OTHER.save(path)
    assert path.read_bytes() == before
    OTHER.save(path, force=True)
    assert Policy.load(path) == OTHER


@pytest.mark.parametrize("policy", [POLICY, MESA], ids=["ours", "mesa"])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_our_own_file_is_overwritten(policy: Policy, line_end: bytes, path: Path) -> None:
    policy.save(path)
    path.write_bytes(path.read_bytes().replace(b"\n", line_end))
    OTHER.save(path)
    assert Policy.load(path) == OTHER


def test_a_link_stays_a_link_to_a_file_with_the_usual_permissions(path: Path) -> None:
    link, plain = path.with_name("link.txt"), path.with_name("plain")
    link.symlink_to(path)
    POLICY.save(link)
    assert link.is_symlink()
    assert Policy.load(path) == POLICY
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_folder_that_is_missing_or_in_place_of_a_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"cannot be written: No such file.*\n"):
        POLICY.save(tmp_path / "no" / "policy.txt")
    for act in (POLICY.save, Policy.load):
        with pytest.raises(PolicyError, match=r"a folder, not a policy file\n"):
            act(tmp_path)


def test_a_full_disk_leaves_the_old_file_and_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    POLICY.save(path)
    before = path.read_bytes()

    def no_space(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(PolicyError, match=r"cannot be written: No space left on device\n"):
        OTHER.save(path)
    assert path.read_bytes() == before
    assert [found.name for found in path.parent.iterdir()] == ["policy.txt"]


def test_a_refusal_of_the_system_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    # The tests may run as root, whom no folder refuses.
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(PolicyError, match=r"cannot be written: Permission denied\n"):
        POLICY.save(path)
    assert not path.exists()
    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(PolicyError, match=r"cannot be read: Permission denied\n"):
        Policy.load(path)


def test_a_missing_file_is_told(path: Path) -> None:
    with pytest.raises(PolicyError, match=r"policy\.txt: no such policy file\n.*mesa-tune search"):
        Policy.load(path)


def test_a_binary_file_is_told(path: Path) -> None:
    for content in (b"\x80\x02}q\x00.", b"\x89PNG\r\n", b"on fc:\x00"):  # a pickle, a picture, a zero
        path.write_bytes(content)
        with pytest.raises(PolicyError, match=r"not a policy") as caught:
            Policy.load(path)
        assert len(str(caught.value).splitlines()) <= 3
