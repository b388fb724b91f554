"""A server's sockets: which Unix socket may be taken over, and which files stay."""

import socket
from pathlib import Path

import pytest

from rooftune.engine.server.run import bind_tcp, bind_unix
from rooftune.policies.errors import InputError


def test_the_socket_of_a_killed_server_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sock"
    with bind_unix(path) as killed:
        killed.listen()
    assert path.is_socket(), "closing removes no file: what kill -9 leaves behind"
    with bind_unix(path) as bound, socket.socket(socket.AF_UNIX) as client:
        bound.listen()
        client.connect(str(path))
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_socket_of_a_live_server_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sock"
    with bind_unix(path) as living:
        living.listen()
        with pytest.raises(InputError, match="cannot listen"):
            bind_unix(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_nothing_else_is_removed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "mine"
    path.mkdir() if kind == "folder" else path.write_text("mine")
    with pytest.raises(InputError, match="mine"):
        bind_unix(path)
    assert path.exists()


def test_a_vanished_client_is_detected_on_every_connection() -> None:
    """Linux hands these down from the listening socket to those it accepts."""
    with bind_tcp("127.0.0.1", 0, 5.0) as bound:
        bound.listen()
        with socket.create_connection(bound.getsockname()), bound.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
