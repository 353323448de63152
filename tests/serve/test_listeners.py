"""One server on several addresses."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from pantheon.errors import PantheonError
from pantheon.serve.http_server import HttpConfig
from pantheon.serve.listeners import Listeners
from pantheon.serve.routes import Router


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_one_port_on_two_addresses() -> None:
    server = Listeners(Router(), HttpConfig(host="127.0.0.1, ::1", port=0))
    server.start()
    try:
        one, other = server.urls
        assert one.rpartition(":")[2] == other.rpartition(":")[2] and "[::1]" in other
        for url in (one, other):
            with urllib.request.urlopen(f"{url}/", timeout=10) as answer:
                assert answer.status == 200
    finally:
        server.stop(1.0)
    assert server.connections == 0


def test_an_address_that_can_not_be_had_leaves_none_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PantheonError, match="can not listen on 127.0.0.1"):
            Listeners(Router(), HttpConfig(host="127.0.0.2,127.0.0.1", port=port))
    with socket.create_server(("127.0.0.2", port)):
        pass
