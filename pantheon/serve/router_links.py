"""How a router is spoken to: Pantheon's own messages, or those of an `smg` gateway [area L].

A link knows one router and says one thing at a time to it; it is used by one thread only.  It raises `RouterError` for
whatever goes wrong.  Must not know the registry of models, threads or when to try again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

TIMEOUT_S = 2.0
_MOST = 1 << 20


class RouterError(Exception):
    """The router can not be reached, or refuses; the text says which."""


@dataclass(frozen=True)
class Instance:
    """One model name of this process as a router sees it; replicas are one instance [M150, M152].

    `capacity`: requests that it works on at a time.
    """

    model_id: str
    instance_id: str
    endpoint: str
    capacity: int


@dataclass(frozen=True)
class Load:
    """What an instance does now."""

    in_flight: int
    capacity: int


class Link(Protocol):
    """One router."""

    def register(self, instance: Instance) -> None:
        """Make it known, or known anew."""

    def beat(self, instance: Instance, load: Load) -> bool:
        """Say that it lives.  False when the router does not know it (any more)."""

    def deregister(self, instance: Instance) -> None:
        """Take it out; one that is gone already is fine."""


Call = Callable[[str, str, Any], tuple[int, Any]]


def caller(url: str, key: str | None = None, timeout_s: float = TIMEOUT_S) -> Call:
    """call(method, path, body) -> (status, JSON value or None).  Raises RouterError when there is no answer.

    A connection for each call, and no proxy from the environment: a router is a neighbour.
    """
    parts = urlsplit(url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"

    def call(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            connection = make(parts.hostname or "", parts.port, timeout=timeout_s)
            with contextlib.closing(connection):
                connection.request(method, parts.path + path, data, headers)
                answer = connection.getresponse()
                text = answer.read(_MOST)
        except (OSError, http.client.HTTPException, ValueError) as fault:
            raise RouterError(f"{method} {url}{path}: {fault or type(fault).__name__}") from None
        try:
            return answer.status, json.loads(text) if text else None
        except ValueError:
            return answer.status, None

    return call


def _accepted(what: str, status: int, value: Any) -> None:
    if not 200 <= status < 300:
        detail = value.get("error") if isinstance(value, Mapping) else None
        text = detail.get("message") if isinstance(detail, Mapping) else detail
        raise RouterError(f"{what}: status {status}" + (f": {str(text)[:200]}" if text else ""))


class LocalLink:
    """Pantheon's own messages: POST /register, /heartbeat and /deregister below the router's address [M150-M153]."""

    def __init__(self, call: Call, node_id: str, transport: str = "local") -> None:
        self._call = call
        self._node_id, self._transport = node_id, transport

    def register(self, instance: Instance) -> None:
        body = {
            "model_id": instance.model_id,
            "instance_id": instance.instance_id,
            "endpoint": instance.endpoint,
            "capacity": instance.capacity,
            "node_id": self._node_id,
            "transport": self._transport,
        }
        _accepted("POST /register", *self._call("POST", "/register", body))

    def beat(self, instance: Instance, load: Load) -> bool:
        body = {
            "instance_id": instance.instance_id,
            "model_id": instance.model_id,
            "node_id": self._node_id,
            "load": {"in_flight": load.in_flight, "capacity": load.capacity},
        }
        status, value = self._call("POST", "/heartbeat", body)
        if status in (404, 410):
            return False
        _accepted("POST /heartbeat", status, value)
        return True

    def deregister(self, instance: Instance) -> None:
        body = {"instance_id": instance.instance_id, "model_id": instance.model_id, "node_id": self._node_id}
        status, value = self._call("POST", "/deregister", body)
        if status not in (404, 410):
            _accepted("POST /deregister", status, value)


class SmgLink:
    """A worker of an smg gateway for each model: it asks one address for one model, hence `/m/{model}`.

    smg polls the workers' health and load itself, so a beat only asks whether it still knows this one.
    """

    def __init__(self, call: Call, api_key: str | None = None) -> None:
        self._call = call
        self._api_key = api_key
        self._ids: dict[str, str] = {}

    @staticmethod
    def address(instance: Instance) -> str:
        """The base URL of one model."""
        return f"{instance.endpoint}/m/{quote(instance.model_id, safe='')}"

    def register(self, instance: Instance) -> None:
        body = {"url": self.address(instance)}
        if self._api_key is not None:
            body["api_key"] = self._api_key
        status, value = self._call("POST", "/workers", body)
        if isinstance(value, Mapping) and value.get("code") == "WORKER_ALREADY_EXISTS":
            found = self._find(instance)
            if found is None:
                raise RouterError("POST /workers: the worker exists and is not listed")
            if found.get("status") == "draining":
                raise RouterError("POST /workers: the gateway is still removing this worker")
            self._ids[instance.instance_id] = str(found["id"])
            return
        _accepted("POST /workers", status, value)
        if not isinstance(value, Mapping) or not value.get("worker_id"):
            raise RouterError("POST /workers: the answer has no worker_id; is this an smg gateway?")
        self._ids[instance.instance_id] = str(value["worker_id"])

    def beat(self, instance: Instance, load: Load) -> bool:
        known = self._ids.get(instance.instance_id)
        if known is None:
            return False
        status, value = self._call("GET", f"/workers/{quote(known, safe='')}", None)
        if status == 404:
            return False
        _accepted("GET /workers", status, value)
        return True

    def deregister(self, instance: Instance) -> None:
        known = self._ids.pop(instance.instance_id, None)
        if known is None:
            found = self._find(instance)
            if found is None:
                return
            known = str(found["id"])
        status, value = self._call("DELETE", f"/workers/{quote(known, safe='')}", None)
        if status != 404:
            _accepted("DELETE /workers", status, value)

    def _find(self, instance: Instance) -> Mapping[str, Any] | None:
        status, value = self._call("GET", "/workers", None)
        _accepted("GET /workers", status, value)
        workers = value.get("workers") if isinstance(value, Mapping) else None
        for worker in workers if isinstance(workers, list) else []:
            if isinstance(worker, Mapping) and worker.get("url") == self.address(instance) and "id" in worker:
                return worker
        return None
