"""Addresses are parsed, stale sockets removed, taken ones refused; with real sockets."""

import socket
from pathlib import Path

import pytest
from headrace_proto.settings import SettingsError
from headrace_shard.address import TcpAddress, UnixAddress, parse
from headrace_shard.errors import StartError


def test_both_forms() -> None:
    assert parse("unix:///run/headrace-0") == UnixAddress(Path("/run/headrace-0"))
    assert parse("unix:///run/headrace-0").target == "unix:/run/headrace-0"
    assert parse("tcp://0.0.0.0:50051") == TcpAddress("0.0.0.0", 50051)
    assert parse("tcp://[::1]:50051").target == "[::1]:50051"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/run/x",
        "unix:/run/x",
        "unix://run/x",
        "tcp://:80",
        "tcp://host",
        "tcp://host:x",
        "tcp://host:70000",
    ],
)
def test_anything_else_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match="--listen: expected"):
        parse(address)


def test_path_that_no_socket_can_have_is_refused() -> None:
    with pytest.raises(SettingsError, match="at most 107 bytes"):
        parse("unix:///" + "x" * 107)


def test_stale_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.is_socket()
    UnixAddress(path).claim()
    assert not path.exists()


def test_socket_in_use_is_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    with socket.socket(socket.AF_UNIX) as used:
        used.bind(str(path))
        used.listen()
        with pytest.raises(StartError, match="another process listens"):
            UnixAddress(path).claim()
    assert path.is_socket()


def test_file_at_the_path_is_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("keep me")
    with pytest.raises(StartError, match="is no socket"):
        UnixAddress(path).claim()
    assert path.read_text() == "keep me"


def test_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file or directory"):
        UnixAddress(tmp_path / "missing" / "shard").claim()


def test_port_in_use_is_refused() -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        with pytest.raises(StartError, match="Address already in use"):
            TcpAddress("127.0.0.1", used.getsockname()[1]).claim()


def test_free_port_is_claimed() -> None:
    TcpAddress("127.0.0.1", 0).claim()
