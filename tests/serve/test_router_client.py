"""What a router is told, and that nothing waits for it [area L: M149-M154, M164, X27, X28]."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pantheon import settings
from pantheon.serve.registry import Registry
from pantheon.serve.router_client import (
    BACKOFF_S,
    HEARTBEAT_S,
    RouterClient,
    check_settings,
    instances,
    registered,
)
from pantheon.serve.router_links import Instance, Load, LocalLink, RouterError, SmgLink, caller
from tests.fakes import FakeClock
from tests.serve.api_server import Api, serving
from tools.mock_registry import MockRegistry, MockSmg

HERE = "http://127.0.0.1:8201"


@pytest.fixture
def router() -> Iterator[MockRegistry]:
    found = MockRegistry().start()
    yield found
    found.stop()


@pytest.fixture
def smg() -> Iterator[MockSmg]:
    found = MockSmg()
    found.start()
    yield found
    found.stop()


@pytest.fixture
def api() -> Iterator[Api]:
    with serving() as found:
        yield found


def local(router: MockRegistry) -> LocalLink:
    return LocalLink(caller(router.url), "node7")


def client_of(api: Api, link: Any, clock: FakeClock) -> RouterClient:
    """Not started: the test takes its steps itself."""
    return RouterClient(api.app.registry, link, HERE, clock)


def paths(router: MockRegistry) -> list[str]:
    return [path for _, path, _ in router.seen]


# ---- off ------------------------------------------------------------------------------------------------------------


def test_unset_means_no_thread_and_no_socket_M149(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PANTHEON_REGISTRY_URL", raising=False)

    def never(*args: Any) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(threading.Thread, "start", never)
    monkeypatch.setattr(socket, "create_connection", never)
    registry = Registry()
    before = registry.on_change
    with registered(registry, HERE) as client:
        assert client is None and registry.on_change is before


# ---- what is sent ---------------------------------------------------------------------------------------------------


def test_a_published_model_is_registered_M150_M153(api: Api, router: MockRegistry) -> None:
    client = client_of(api, local(router), FakeClock())
    client.step()
    assert router.seen == []
    api.add("m", pieces=["x"])
    client.step()
    method, path, body = router.seen[0]
    assert (method, path) == ("POST", "/register")
    assert body == {
        "model_id": "m", "instance_id": "127.0.0.1:8201:m", "endpoint": HERE, "capacity": 1, "node_id": "node7",
        "transport": "local",
    }  # fmt: skip


def test_settings_reach_the_router_M153_M164(
    api: Api, router: MockRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PANTHEON_REGISTRY_URL", router.url)
    monkeypatch.setenv("PANTHEON_REGISTRY_KEY", "sesame")
    api.add("m", pieces=["x"])
    with registered(api.app.registry, HERE):
        router.wait_for(lambda: router.instances)
    (body,) = [body for _, path, body in router.seen if path == "/register"]
    assert (body["node_id"], body["transport"], body["endpoint"]) == ("node0", "local", HERE)
    assert set(router.keys) == {"Bearer sesame"}
    assert router.instances == {}
    monkeypatch.setenv("PANTHEON_NODE_ID", "rack2")
    monkeypatch.setenv("PANTHEON_ENDPOINT", "https://gpu.lan/pantheon")
    with registered(api.app.registry, HERE):
        router.wait_for(lambda: router.instances)
        (body,) = router.instances.values()
        assert body["node_id"] == "rack2" and body["endpoint"] == "https://gpu.lan/pantheon"
        assert body["instance_id"] == "gpu.lan:443:m"


def test_replicas_are_one_instance_M152(api: Api, router: MockRegistry) -> None:
    """In-process balancing is the registry's own."""
    for die in (2, 3):
        entry = api.app.registry.reserve("worker", "/w", (die,))
        other = api.add(f"x{die}", pieces=["x"])
        assert other.model is not None and other.state is not None
        api.app.registry.publish(entry, other.model, other.state)
    found = instances([e for e in api.app.registry.all_entries() if e.name == "worker"], HERE)
    assert found == {"worker": Instance("worker", "127.0.0.1:8201:worker", HERE, 2)}
    client_of(api, local(router), FakeClock()).step()
    assert sorted(router.instances) == [f"127.0.0.1:8201:{name}" for name in ("worker", "x2", "x3")]


def test_a_beat_every_five_seconds_tells_the_load_M151_M104(api: Api, router: MockRegistry) -> None:
    clock = FakeClock()
    client = client_of(api, local(router), clock)
    api.add("m", pieces=["x"])
    assert client.step() == HEARTBEAT_S
    router.seen.clear()
    clock.advance(HEARTBEAT_S - 0.5)
    assert client.step() == pytest.approx(0.5) and router.seen == []
    with api.app.registry.lease("m"):
        clock.advance(0.5)
        client.step()
    clock.advance(HEARTBEAT_S)
    client.step()
    assert paths(router) == ["/heartbeat", "/heartbeat"]
    assert [body["load"]["in_flight"] for _, _, body in router.seen] == [1, 0]
    assert router.seen[0][2]["instance_id"] == "127.0.0.1:8201:m" and router.seen[0][2]["node_id"] == "node7"


def test_a_beat_takes_no_ref_and_does_not_touch_the_choice_of_a_replica_X27(api: Api, router: MockRegistry) -> None:
    entry = api.add("m", pieces=["x"])
    before = (entry.refs, entry.last_use)
    clock = FakeClock()
    client = client_of(api, local(router), clock)
    for _ in range(3):
        client.step()
        clock.advance(HEARTBEAT_S)
    assert (entry.refs, entry.last_use) == before
    # and a beat that hangs holds no unload up
    hanging = threading.Event()
    entered = threading.Event()

    class Hanging(LocalLink):
        def beat(self, instance: Instance, load: Load) -> bool:
            entered.set()
            return hanging.wait(20)

    slow = RouterClient(api.app.registry, Hanging(caller(router.url), "n"), HERE)
    slow.start()
    assert entered.wait(20)
    assert [gone.name for gone in api.app.registry.unload("m", timeout_s=0)] == ["m"]
    hanging.set()
    assert slow.stop(20)


def test_models_that_come_and_go_are_added_and_removed_X28(api: Api, router: MockRegistry) -> None:
    client = RouterClient(api.app.registry, local(router), HERE)
    client.start()
    api.add("a", pieces=["x"])
    router.wait_for(lambda: "127.0.0.1:8201:a" in router.instances)
    api.add("b", pieces=["x"])
    router.wait_for(lambda: len(router.instances) == 2)
    with api.app.registry.lease("a"):
        # taken out when the unload begins, not when it ends
        unload = threading.Thread(target=lambda: api.app.registry.unload("a", timeout_s=20))
        unload.start()
        router.wait_for(lambda: list(router.instances) == ["127.0.0.1:8201:b"])
    unload.join(20)
    assert client.stop(20)
    assert router.instances == {}


# ---- a router that is not well --------------------------------------------------------------------------------------


def test_a_router_that_is_down_is_tried_ever_less_often_X28(
    api: Api, router: MockRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    api.add("m", pieces=["x"])
    clock = FakeClock()
    client = client_of(api, local(router), clock)
    router.refuse = 503
    waits = []
    for _ in range(9):
        waits.append(client.step())
        asked = len(router.seen)
        assert client.step() == pytest.approx(waits[-1]) and len(router.seen) == asked, "asked before its time"
        clock.advance(waits[-1])
    assert waits[0] == BACKOFF_S[0] and waits[-1] == BACKOFF_S[1] and waits == sorted(waits)
    assert len(caplog.records) == 1 and "status 503: not now" in caplog.text
    router.refuse = None
    assert client.step() == HEARTBEAT_S
    assert len(router.instances) == 1
    router.refuse = 500
    clock.advance(HEARTBEAT_S)
    assert client.step() == BACKOFF_S[0]
    assert api.whole()["choices"][0]["message"]["content"] == "x"


def test_a_router_that_started_anew_is_told_again(api: Api, router: MockRegistry) -> None:
    clock = FakeClock()
    client = client_of(api, local(router), clock)
    api.add("m", pieces=["x"])
    client.step()
    router.instances.clear()
    clock.advance(HEARTBEAT_S)
    client.step()
    client.step()
    assert paths(router) == ["/register", "/heartbeat", "/heartbeat", "/register"]
    assert len(router.instances) == 1


def test_nothing_waits_for_a_router_that_does_not_answer_X28(api: Api) -> None:
    """It accepts and says nothing: serving goes on, and the end comes in time."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        link = LocalLink(caller(f"http://127.0.0.1:{deaf.getsockname()[1]}", timeout_s=20), "n")
        client = RouterClient(api.app.registry, link, HERE)
        client.start()
        api.add("m", pieces=["x"])
        deaf.settimeout(20)
        taken, _ = deaf.accept()
        with taken:
            assert api.whole()["choices"][0]["message"]["content"] == "x"
            assert client.stop(0.05) is False
        # cut off, the thread ends by itself
        assert client.stop(20) is True


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\n\r\nhello", b"nonsense\r\n\r\n", b"HTTP/1.1 302 F\r\n\r\n"]
)
def test_whatever_a_router_says_is_a_router_error_or_an_answer(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def once() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(answer)
                sock.shutdown(socket.SHUT_WR)
                # all of the request, headers and body: what is closed unread resets the connection
                with contextlib.suppress(OSError):
                    while sock.recv(65536):
                        pass

        thread = threading.Thread(target=once)
        thread.start()
        link = LocalLink(caller(f"http://127.0.0.1:{server.getsockname()[1]}"), "n")
        if answer.startswith(b"HTTP/1.1 200"):
            link.register(Instance("m", "i", HERE, 1))
        else:
            with pytest.raises(RouterError):
                link.register(Instance("m", "i", HERE, 1))
        thread.join(20)
    with pytest.raises(RouterError, match=r"POST .*/register"):
        link.register(Instance("m", "i", HERE, 1))


# ---- smg ------------------------------------------------------------------------------------------------------------


def test_each_model_is_a_worker_of_the_gateway(api: Api, smg: MockSmg) -> None:
    clock = FakeClock()
    client = client_of(api, SmgLink(caller(smg.url), "k"), clock)
    api.add("m", pieces=["x"])
    api.add("org/b 2", pieces=["x"])
    client.step()
    assert [body for method, _, body in smg.seen if method == "POST"] == [
        {"url": f"{HERE}/m/m", "api_key": "k"},
        {"url": f"{HERE}/m/org%2Fb%202", "api_key": "k"},
    ]
    smg.seen.clear()
    clock.advance(HEARTBEAT_S)
    client.step()
    assert smg.seen == [("GET", "/workers/w1", None), ("GET", "/workers/w2", None)]
    smg.instances.clear()
    clock.advance(HEARTBEAT_S)
    client.step()
    client.step()
    assert sorted(worker["url"] for worker in smg.instances.values()) == [f"{HERE}/m/m", f"{HERE}/m/org%2Fb%202"]
    api.app.registry.unload("m", timeout_s=0)
    client.step()
    assert [worker["url"] for worker in smg.instances.values()] == [f"{HERE}/m/org%2Fb%202"]


def test_a_worker_that_the_gateway_has_already_is_adopted(api: Api, smg: MockSmg) -> None:
    """WORKER_ALREADY_EXISTS: from a process that was killed on this port."""
    call = caller(smg.url)
    assert call("POST", "/workers", {"url": f"{HERE}/m/m"})[0] == 202
    api.add("m", pieces=["x"])
    clock = FakeClock()
    client = client_of(api, SmgLink(call), clock)
    client.step()
    assert list(smg.instances) == ["w1"]
    clock.advance(HEARTBEAT_S)
    client.step()
    assert smg.seen[-1] == ("GET", "/workers/w1", None)
    # one that is on its way out is waited for
    link = SmgLink(call)
    smg.instances["w1"]["status"] = "draining"
    with pytest.raises(RouterError, match="removing"):
        link.register(Instance("m", "i", HERE, 1))
    # and one of a former life can be taken out without its id
    link.deregister(Instance("m", "i", HERE, 1))
    link.deregister(Instance("m", "i", HERE, 1))
    assert smg.instances == {}


def test_something_else_behind_the_address_is_refused(router: MockRegistry) -> None:
    link = SmgLink(caller(router.url))
    with pytest.raises(RouterError, match="status 404"):
        link.register(Instance("m", "i", HERE, 1))
    assert link.beat(Instance("m", "i", HERE, 1), Load(0, 1)) is False


def test_smg_transport_from_the_settings(api: Api, smg: MockSmg, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANTHEON_REGISTRY_URL", smg.url)
    monkeypatch.setenv("PANTHEON_REGISTRY_TRANSPORT", "smg")
    api.add("m", pieces=["x"])
    with registered(api.app.registry, HERE, ("secret",)):
        smg.wait_for(lambda: smg.instances)
    assert smg.instances == {} and smg.seen[0] == ("POST", "/workers", {"url": f"{HERE}/m/m", "api_key": "secret"})


# ---- the start ------------------------------------------------------------------------------------------------------


def test_an_address_that_no_router_can_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PANTHEON_REGISTRY_URL", raising=False)
    check_settings("0.0.0.0")
    monkeypatch.setenv("PANTHEON_REGISTRY_URL", "http://10.0.0.1:9000")
    for host in ("0.0.0.0", "::", "[::]"):
        with pytest.raises(settings.SettingError, match="PANTHEON_ENDPOINT"):
            check_settings(host)
    check_settings("10.0.0.2")
    monkeypatch.setenv("PANTHEON_ENDPOINT", "http://10.0.0.2:8201")
    check_settings("0.0.0.0")
