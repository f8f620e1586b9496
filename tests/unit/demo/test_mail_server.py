"""The mail server of the story: a ledger of every call, one mail per key."""

import http.client
from typing import Any

import pytest

from onepen.demo.mail_server import MailServer, send

CALL: dict[str, Any] = {
    "sessionId": "desk", "runId": "run-1", "generation": 2, "name": "send_mail", "actionKey": "k1",
    "argsDigest": "d1", "to": "somebody",
}  # fmt: skip


def test_a_key_is_one_mail_and_every_call_is_in_the_ledger() -> None:
    with MailServer() as server:
        answers = [
            send(server.address, CALL),
            send(server.address, CALL),
            send(server.address, {**CALL, "actionKey": "k2"}),
        ]
        ledger = server.ledger()
    assert [a["mail"] for a in answers] == ["mail-1", "mail-1", "mail-3"]
    assert [a["sent"] for a in answers] == [True, False, True]
    assert [(e.number, e.action_key, e.effective) for e in ledger] == [
        (1, "k1", True),
        (2, "k1", False),
        (3, "k2", True),
    ]
    assert (ledger[0].run_id, ledger[0].generation, ledger[0].args_digest) == ("run-1", 2, "d1")


@pytest.mark.parametrize("missing", ["sessionId", "generation", "actionKey"])
def test_a_call_without_its_members_is_refused_and_not_booked(missing: str) -> None:
    with MailServer() as server:
        with pytest.raises(RuntimeError, match="400"):
            send(server.address, {k: v for k, v in CALL.items() if k != missing})
        assert server.ledger() == []


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b"x" * 70_000])
def test_garbage_is_refused(body: bytes) -> None:
    with MailServer() as server:
        connection = http.client.HTTPConnection(server.address, timeout=5)
        try:
            connection.request("POST", "/mails", body)
            assert connection.getresponse().status == 400
        finally:
            connection.close()
        assert server.ledger() == []


def test_nobody_listens_afterwards() -> None:
    with MailServer() as server:
        address = server.address
    with pytest.raises(OSError, match="refused"):
        send(address, CALL)
