import os
import stat
from pathlib import Path

import msgspec
import pytest

from millrace.cluster.address import ClientKeys
from millrace.cluster.join.ticket import (
    JoinTicket,
    check_versions,
    own_versions,
    read_ticket,
    ticket_file,
)
from millrace.core.errors import ConfigError, RunFailed

TICKET = JoinTicket(
    address="tcp://controller:5000",
    heartbeat_timeout_s=30.0,
    keys=ClientKeys(server="s" * 40, public="c" * 40, secret="x" * 40),
    token="t" * 32,
    versions=own_versions(),
)


def test_ticket_can_be_read_while_the_run_lasts_and_is_removed_afterwards(tmp_path: Path):
    path = tmp_path / "new" / "ticket.json"
    with ticket_file(TICKET, path):
        assert read_ticket(path) == TICKET
    assert list(path.parent.iterdir()) == []


def test_only_its_owner_can_read_a_ticket_whatever_the_umask(tmp_path: Path):
    path = tmp_path / "ticket.json"
    before = os.umask(0)
    try:
        with ticket_file(TICKET, path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_ticket_is_removed_also_when_the_run_fails(tmp_path: Path):
    path = tmp_path / "ticket.json"
    with pytest.raises(ZeroDivisionError), ticket_file(TICKET, path):
        raise ZeroDivisionError
    assert not path.exists()


def test_ticket_of_a_killed_run_is_replaced_and_that_of_a_newer_run_is_kept(tmp_path: Path):
    path = tmp_path / "ticket.json"
    newer = JoinTicket(
        **{name: getattr(TICKET, name) for name in TICKET.__struct_fields__} | {"token": "n"}
    )
    with ticket_file(TICKET, path):
        leave_open = ticket_file(newer, path)
        leave_open.__enter__()
    assert read_ticket(path) == newer


@pytest.mark.parametrize("content", [b"my notes", b"{}", b"\xff\xfe", b""])
def test_file_that_is_not_a_ticket_is_never_overwritten(tmp_path: Path, content: bytes):
    path = tmp_path / "ticket.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="exists and is not a ticket"), ticket_file(TICKET, path):
        pass
    assert path.read_bytes() == content
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a complete ticket"):
        read_ticket(path)


def test_error_of_an_unwritable_path_is_one_sentence(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")  # which no user can read
    unwritable = [tmp_path, tmp_path / "file" / "ticket.json", tmp_path / "loop"]
    for path in (*unwritable, tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match=r"cluster\.ticket = .* choose another path"):
            ticket_file(TICKET, path).__enter__()


def test_ticket_that_cannot_be_removed_does_not_hide_how_the_run_ended(tmp_path: Path, capsys):
    path = tmp_path / "ticket.json"
    with ticket_file(TICKET, path):
        path.unlink()
        path.mkdir()
    assert path.is_dir()
    assert capsys.readouterr().err == ""
    path.rmdir()
    run = ticket_file(TICKET, path)
    run.__enter__()
    path.unlink()
    path.symlink_to(path)  # which no user can read
    error = RunFailed("no engine is left")
    assert not run.__exit__(RunFailed, error, None)
    assert "cannot be removed: Too many levels of symbolic links" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_ticket_that_others_can_read_is_refused(tmp_path: Path, mode: int):
    path = tmp_path / "ticket.json"
    with ticket_file(TICKET, path):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
            read_ticket(path)


def test_missing_ticket_is_refused_in_one_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        read_ticket(tmp_path / "ticket.json")


def test_incomplete_ticket_is_refused_without_quoting_it(tmp_path: Path):
    path = tmp_path / "ticket.json"
    with ticket_file(TICKET, path):
        half = path.read_bytes()[:-8]
    path.touch(mode=0o600)
    path.write_bytes(half)
    with pytest.raises(ConfigError) as info:
        read_ticket(path)
    assert TICKET.keys.secret not in str(info.value)


def test_host_with_other_package_versions_is_refused_in_one_sentence():
    check_versions(TICKET)
    assert {"Python", "millrace", "torch", "transformers"} == TICKET.versions.keys()
    others = {**TICKET.versions, "torch": "1.0", "millrace": "9"}
    with pytest.raises(ConfigError) as info:
        check_versions(msgspec.structs.replace(TICKET, versions=others))
    own = own_versions()
    assert f"has millrace {own['millrace']} instead of 9, torch {own['torch']}" in str(info.value)
    assert "instead of 1.0, which the run at tcp://controller:5000 has" in str(info.value)
    assert "transformers" not in str(info.value)


def test_ticket_of_another_format_names_the_version_of_millrace(tmp_path: Path):
    path = tmp_path / "ticket.json"
    with ticket_file(TICKET, path):
        other = path.read_bytes().replace(b"ticket-3", b"ticket-1")
        path.write_bytes(other)
        with pytest.raises(ConfigError, match="another version of Millrace; install the version"):
            read_ticket(path)
        path.unlink()


def test_no_repr_shows_a_secret():
    shown = repr(TICKET) + repr(TICKET.keys)
    assert TICKET.keys.secret not in shown
    assert TICKET.token not in shown
