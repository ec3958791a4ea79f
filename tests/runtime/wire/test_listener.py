"""Sockets that listen over IPv4 and IPv6, with and without IPv6 in the kernel."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import closing

import pytest
import zmq

from minisgl.frontend.server.listeners import bind_all_addresses, bind_same_host
from minisgl.launcher.listener import bind, listen_on_all
from minisgl.wire.listener import ALL_ADDRESSES, bind_tcp
from minisgl.wire.sockets import open_socket, url_host

LOOPBACK = ("127.0.0.1", "::1")


def listening(listener: socket.socket) -> socket.socket:
    listener.listen()
    return listener


LISTENERS: dict[str, Callable[[], socket.socket]] = {
    "frontend": lambda: listening(bind(ALL_ADDRESSES, 0)),
    "admin": lambda: listening(bind_same_host(bind(ALL_ADDRESSES, 0), 0, "--admin-port")),
    "frontend's control port": lambda: bind_all_addresses(0),
    "launcher's control and link port": lambda: listen_on_all("control", 0),
}


@pytest.mark.parametrize("make", LISTENERS.values(), ids=LISTENERS)
@pytest.mark.parametrize("host", LOOPBACK)
def test_ports_of_pods_accept_connections_over_both_families(make: Callable[[], socket.socket], host: str) -> None:
    with closing(make()) as listener:
        client = socket.create_connection((host, listener.getsockname()[1]), timeout=30)
        with client, listener.accept()[0] as accepted:
            assert accepted.getpeername()[1] == client.getsockname()[1]


@pytest.mark.parametrize("error", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
@pytest.mark.parametrize("make", LISTENERS.values(), ids=LISTENERS)
def test_a_kernel_without_ipv6_listens_over_ipv4(
    make: Callable[[], socket.socket], error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoIpv6(socket.socket):
        def __init__(self, family: int = -1, *args: int, **options: object) -> None:
            if family == socket.AF_INET6:
                raise OSError(error, "no IPv6")
            super().__init__(family, *args)

    monkeypatch.setattr("minisgl.wire.listener.socket.socket", NoIpv6)
    listener = make()
    monkeypatch.undo()
    with closing(listener), socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=30):
        assert listener.family == socket.AF_INET


def test_a_port_in_use_is_an_error_and_not_taken_over_ipv4_alone() -> None:
    with closing(listening(bind_tcp(ALL_ADDRESSES, 0))) as taken, pytest.raises(OSError) as refused:
        bind_tcp(ALL_ADDRESSES, taken.getsockname()[1])
    assert refused.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("host", LOOPBACK)
def test_an_address_of_one_family_is_bound_alone(host: str) -> None:
    with closing(bind_tcp(host, 0)) as listener:
        assert listener.getsockname()[0] == host


@pytest.mark.parametrize("host", LOOPBACK)
def test_a_scheduler_is_reached_over_both_families(host: str) -> None:
    with zmq.Context() as context:
        server, client = open_socket(context, zmq.ROUTER), open_socket(context, zmq.DEALER)
        try:
            port = server.bind_to_random_port("tcp://*")
            client.connect(f"tcp://{url_host(host)}:{port}")
            client.send(b"hello")
            assert server.poll(30_000)
            assert server.recv_multipart()[1] == b"hello"
        finally:
            server.close()
            client.close()
