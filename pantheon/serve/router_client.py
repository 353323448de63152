"""Tells a router which models answer here: on publish, on unload, at the end, and every five seconds in between.

Off unless PANTHEON_REGISTRY_URL is set: then nothing here runs [M149].  One thread makes what the router knows equal to
what is loaded; it looks at the table of models and takes no ref, so that neither the choice of a replica nor an unload
notices [X27].  A router that is down is tried again ever less often, and no request waits for any of it [X28].
Must not know HTTP messages (router_links.py) or how models load.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from pantheon import log, settings
from pantheon.seams import SYSTEM_CLOCK, Clock
from pantheon.serve.http_access import is_loopback
from pantheon.serve.registry import Entry, Registry
from pantheon.serve.router_links import Instance, Link, Load, LocalLink, RouterError, SmgLink, caller

#: RW_HEARTBEAT_SECONDS, to which the spec gives no number
HEARTBEAT_S = 5.0
BACKOFF_S = (0.5, 30.0)
_log = log.logger("router")


class RouterClient:
    """Keeps one router informed.  `start()` and `stop()` once each, from one thread; `poke()` from any."""

    def __init__(self, registry: Registry, link: Link, endpoint: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """endpoint: where the router reaches this process."""
        self._registry, self._link, self._endpoint, self._clock = registry, link, endpoint, clock
        #: on a lock of its own: guards _poked and _stopping
        self._wake = threading.Condition()
        self._poked = False
        self._stopping = False
        # the rest belongs to the thread
        self._known: dict[str, Instance] = {}
        self._beat_at = 0.0
        self._retry_at = 0.0
        self._delay_s = 0.0
        self._thread = threading.Thread(target=self._run, name="router-client", daemon=True)

    def start(self) -> None:
        """Begin; returns at once, whether or not the router is there."""
        self._registry.on_change = self.poke
        self._thread.start()

    def poke(self) -> None:
        """The table of models has changed."""
        with self._wake:
            self._poked = True
            self._wake.notify_all()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """Take every instance out and end the thread; False when the router did not let that happen in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._known

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait(self.step()):
            pass
        self._leave()

    def _wait(self, seconds: float) -> bool:
        """Until poked or `seconds` have passed; False when it is time to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._poked or self._stopping, max(0.0, seconds))
            self._poked = False
            return not self._stopping

    def step(self) -> float:
        """Do what is due now; returns the seconds until something is due again."""
        now = self._clock.monotonic()
        if now < self._retry_at:
            return self._retry_at - now
        entries = [entry for entry in self._registry.all_entries() if entry.ready]
        try:
            self._reconcile(instances(entries, self._endpoint))
            if now >= self._beat_at:
                self._beat_at = now + HEARTBEAT_S
                self._beat(loads(entries))
        except RouterError as fault:
            return self._failed(fault, now)
        if self._delay_s:
            _log.info("router answers again")
            self._delay_s = 0.0
        return self._beat_at - now

    def _reconcile(self, wanted: Mapping[str, Instance]) -> None:
        for instance in [known for name, known in self._known.items() if name not in wanted]:
            self._link.deregister(instance)
            del self._known[instance.model_id]
            _log.info("deregistered %s", log.fields(instance=instance.instance_id))
        for instance in wanted.values():
            if self._known.get(instance.model_id) != instance:
                self._link.register(instance)
                self._known[instance.model_id] = instance
                _log.info("registered %s", log.fields(instance=instance.instance_id, capacity=instance.capacity))

    def _beat(self, now: Mapping[str, Load]) -> None:
        for name, instance in list(self._known.items()):
            if name in now and not self._link.beat(instance, now[name]):
                # a router that has started anew has forgotten us
                del self._known[name]
                self.poke()

    def _failed(self, fault: RouterError, now: float) -> float:
        if not self._delay_s:
            _log.warning("router does not take us %s", log.fields(why=str(fault)))
        first, most = BACKOFF_S
        self._delay_s = min(most, self._delay_s * 2 or first)
        self._retry_at = now + self._delay_s
        return self._delay_s

    def _leave(self) -> None:
        for name, instance in list(self._known.items()):
            try:
                self._link.deregister(instance)
            except RouterError as fault:
                _log.warning("could not deregister %s", log.fields(instance=instance.instance_id, why=str(fault)))
                return
            del self._known[name]
            _log.info("deregistered %s", log.fields(instance=instance.instance_id))


# ---- what a router is told ------------------------------------------------------------------------------------------


def instances(entries: list[Entry], endpoint: str) -> dict[str, Instance]:
    """Model name -> the instance that all its replicas are [M150, M152]."""
    place = urlsplit(endpoint)
    port = place.port or (443 if place.scheme == "https" else 80)
    found: dict[str, Instance] = {}
    for name, load in loads(entries).items():
        found[name] = Instance(name, f"{place.hostname}:{port}:{name}", endpoint, load.capacity)
    return found


def loads(entries: list[Entry]) -> dict[str, Load]:
    """Model name -> load, over all its replicas [M104, M151]."""
    found: dict[str, Load] = {}
    for entry in entries:
        before = found.get(entry.name, Load(0, 0))
        found[entry.name] = Load(before.in_flight + entry.refs, before.capacity + entry.users)
    return found


# ---- from the environment -------------------------------------------------------------------------------------------


def check_settings(host: str) -> None:
    """Refuse a server that a router could not find.  Raises SettingError."""
    if settings.get("PANTHEON_REGISTRY_URL") is None or settings.get("PANTHEON_ENDPOINT") is not None:
        return
    if host.strip("[]") in ("0.0.0.0", "::", ""):
        text = f"must say where the router reaches this server, because --host {host} is no address to send to"
        raise settings.SettingError(f"PANTHEON_ENDPOINT: {text}", param="PANTHEON_ENDPOINT")
    away = urlsplit(settings.get("PANTHEON_REGISTRY_URL")).hostname or ""
    if is_loopback(host) and not is_loopback(away):
        _log.warning("the router is elsewhere, but this server listens on loopback only %s", log.fields(host=host))


@contextmanager
def registered(registry: Registry, url: str, api_keys: tuple[str, ...] = ()) -> Iterator[RouterClient | None]:
    """Run a client for PANTHEON_REGISTRY_URL while the block runs; None, and nothing at all, when that is unset.

    url: the server's own address.
    """
    router = settings.get("PANTHEON_REGISTRY_URL")
    if router is None:
        yield None
        return
    call = caller(router, settings.get("PANTHEON_REGISTRY_KEY"))
    transport = settings.get("PANTHEON_REGISTRY_TRANSPORT")
    link: Link
    if transport == "smg":
        link = SmgLink(call, api_keys[0] if api_keys else None)
    else:
        link = LocalLink(call, settings.get("PANTHEON_NODE_ID"), transport)
    client = RouterClient(registry, link, settings.get("PANTHEON_ENDPOINT") or url)
    _log.info("router %s", log.fields(url=router, transport=transport))
    client.start()
    try:
        yield client
    finally:
        client.stop()
