"""How a subscription ends: by its deadline wherever it waits, and by a close from wherever it comes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from onepen.streams import log_tail, snapshots
from onepen.streams.deadline import Deadline, DeadlineExpired
from onepen.streams.log_tail import LogTail
from onepen.streams.seams import Seam, run_seam, session_seam
from onepen.streams.settings import Settings, load_settings
from onepen.streams.subscriber import Subscriber, Subscription, every_event

NOWHERE = "127.0.0.1:9"
TIMEOUT_MS = 300
OWN_LIMIT_MS = 60_000
"""What a wait would take that knows nothing of the deadline."""
LONG_S = 30.0


@pytest.mark.parametrize(
    "make",
    [
        lambda s: s.run("run-1", timeout_ms=TIMEOUT_MS),
        lambda s: s.session("s", timeout_ms=TIMEOUT_MS),
        lambda s: s.input("in-1", timeout_ms=TIMEOUT_MS),
        lambda s: s.tenant(timeout_ms=TIMEOUT_MS),
        lambda s: s.all(timeout_ms=TIMEOUT_MS),
    ],
    ids=["run", "session", "input", "tenant", "all"],
)
def test_the_deadline_ends_the_wait_for_a_broker(
    make: Callable[[Subscriber], Subscription], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "START_TIMEOUT_MS", OWN_LIMIT_MS)
    began = time.monotonic()
    with pytest.raises(DeadlineExpired, match="not done within 300 ms"):
        make(Subscriber(NOWHERE))
    assert time.monotonic() - began < LONG_S


@pytest.fixture
def silent() -> Iterator[Settings]:
    """Those of a database that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield load_settings(dsn=f"postgresql://u:p@127.0.0.1:{server.getsockname()[1]}/db")


@pytest.mark.parametrize(
    "seam",
    [
        lambda settings, deadline: session_seam(settings, 0, "s", (0, 0), deadline),
        lambda settings, deadline: run_seam(settings, [0], "run-1", 0, deadline),
    ],
    ids=["session", "run"],
)
def test_the_deadline_ends_the_wait_for_the_tables(
    silent: Settings, seam: Callable[[Settings, Deadline], Seam], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "CLOSE_TIMEOUT_S", OWN_LIMIT_MS / 1000)
    with pytest.raises(DeadlineExpired, match="tables"):
        seam(silent, Deadline(TIMEOUT_MS))


class Tail:
    """Nothing ever comes; `polling` tells that somebody waits for it."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.polling = threading.Event()
        self.caught_up = False
        self.closed_by: threading.Thread | None = None
        self.on_poll: Callable[[], None] = lambda: None

    def poll(self) -> None:
        assert self.closed_by is None, "read after it was closed"
        self.polling.set()
        self.on_poll()
        self.stopping.wait(0.01)

    def close(self) -> None:
        self.closed_by = self.closed_by or threading.current_thread()


def subscription_on(tail: Tail) -> Subscription:
    found = cast(LogTail, tail)
    records = Subscriber(NOWHERE)._read(found, Deadline(OWN_LIMIT_MS))
    return Subscription(found, every_event(records, found, True, None))


def test_a_close_from_another_thread_ends_the_wait_and_the_reader_closes() -> None:
    tail = Tail()
    subscription = subscription_on(tail)
    found: list[list[object]] = []
    reader = threading.Thread(target=lambda: found.append(list(subscription)), daemon=True)
    reader.start()
    assert tail.polling.wait(LONG_S)
    subscription.close()
    reader.join(LONG_S)
    assert (found, tail.closed_by) == ([[]], reader)
    subscription.close()
    assert list(subscription) == []


def test_a_close_out_of_the_wait_itself_ends_it() -> None:
    """A signal handler runs in the thread that waits."""
    tail = Tail()
    subscription = subscription_on(tail)
    tail.on_poll = subscription.close
    assert list(subscription) == []
    assert tail.closed_by is threading.current_thread()


def test_a_close_while_nobody_waits_closes_at_once() -> None:
    tail = Tail()
    subscription_on(tail).close()
    assert tail.closed_by is threading.current_thread()
