"""The address of PostgreSQL: what is taken, what is refused without a word of it, and how it is named."""

from __future__ import annotations

import errno
import socket

import pytest

from onepen.schemas.errors import Retryable
from onepen.sinks.postgres_dsn import answering, checked, hosts, place

TAKEN = {
    "postgresql://u:p%23ss@h/db": "h:5432",
    "postgres://h": "h:5432",
    "postgresql://u:p@h:6000/db?sslmode=require&application_name=a@b": "h:6000",
    "postgresql://u:p@one:1,two:2,three/db": "one:1,two:2,three:5432",
    "postgresql://u@[::1]:7/db": "[::1]:7",
    "postgresql:///db?host=/run/postgresql": "/run/postgresql:5432",
    "postgresql:///db": "localhost:5432",
    "postgresql://u:p@h/db?port=8": "h:8",
}


@pytest.mark.parametrize("dsn", TAKEN)
def test_an_address_is_named_by_its_hosts_and_ports(dsn: str) -> None:
    assert checked(dsn) == dsn
    assert place(dsn) == TAKEN[dsn]


REFUSED = [
    *(f"postgresql://user:{password}@host/db" for password in (
        "pa#hush", "12#hush", "pa/hush", "12/hush", "pa?hush", "12?hush", "12?hush=1", "pa@hush", "pa[hush", "[hush]",
    )),
    "postgresql://user:pw@host:hush/db",
    "postgresql://user:pw@host:65536/hush",
    "postgresql://user:pw@host:0/hush",
    "postgresql://user:pw@one,,two/hush",
    "postgresql://user:pw@host/db?hush",
    "postgresql://user:pw@host/db?port=hush",
    "mysql://user:hush@host/db",
    "host=host password=hush",
]  # fmt: skip


@pytest.mark.parametrize("dsn", REFUSED)
def test_what_cannot_be_taken_apart_is_refused_without_a_word_of_it(dsn: str) -> None:
    with pytest.raises(ValueError, match="percent-encode") as refused:
        checked(dsn)
    assert "hush" not in str(refused.value)
    assert refused.value.__suppress_context__, "what urllib says quotes the password"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('h', 1)"), "Connection refused"),
        (TimeoutError(), "no answer in time"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (OSError("Multiple exceptions: one, two"), "Multiple exceptions: one, two"),
    ],
)
def test_nobody_there_is_retryable_and_names_the_place(error: OSError, reason: str) -> None:
    with (
        pytest.raises(Retryable, match=f"^PostgreSQL at h:1 does not answer: {reason}$"),
        answering("postgresql://h:1"),
    ):
        raise error
    assert hosts("postgresql://h:1") == [("h", "1")]
