"""One server on several addresses: `--host 127.0.0.1,::1`.  Must not know requests."""

from __future__ import annotations

import time
from dataclasses import replace

from pantheon.serve.http_server import HttpConfig, PantheonServer
from pantheon.serve.routes import Router


class Listeners:
    """A PantheonServer for each address, on one port; bound once constructed.  Raises PantheonError as they do."""

    def __init__(self, router: Router, config: HttpConfig) -> None:
        """config.host: one address, or several with commas between them."""
        self._servers: list[PantheonServer] = []
        try:
            for host in config.host.split(","):
                port = self._servers[0].port if self._servers else config.port
                self._servers.append(PantheonServer(router, replace(config, host=host.strip(), port=port)))
        except BaseException:
            for server in self._servers:
                server.server_close()
            raise

    @property
    def urls(self) -> list[str]:
        """Where a client on this machine finds the server; the first is the one that others are told."""
        return [server.url for server in self._servers]

    @property
    def connections(self) -> int:
        """How many connections are open and counted."""
        return sum(server.connections for server in self._servers)

    def start(self) -> None:
        """Serve, each on a thread of its own."""
        for server in self._servers:
            server.start()

    def stop(self, deadline_s: float) -> None:
        """As PantheonServer.stop: all have the same deadline."""
        deadline = time.monotonic() + deadline_s
        for server in self._servers:
            server.stopping.set()
        for server in self._servers:
            server.stop(max(0.1, deadline - time.monotonic()))
