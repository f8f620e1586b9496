"""Keys of the state topic (architecture section 4). Parts of a key are escaped, so no id can forge another's key.

`s/<tenant>/<session>` head · `i/…/<input_id>` remembered or pending input · `a/…/<name>/<key>` action key ·
`b/…/<kind>/<id>` open branch ·
`c/…/<call_id>` call of a subtask · `q/…/list` the pending list · `r/…/last` what a retry would take over ·
`p/<tenant>/<version>` policy · `partition` the engine's own record.
"""

from __future__ import annotations

PARTITION_KEY = b"partition"
HEAD, INPUTS, ACTIONS, BRANCHES, CALLS, RETRY, QUEUE = "s", "i", "a", "b", "c", "r", "q"
_SESSION_KINDS = (b"s/", b"i/", b"a/", b"b/", b"c/", b"r/", b"q/")


def escaped(text: str) -> str:
    """`text` without slashes, reversibly; ids are printable ASCII, so two characters suffice."""
    return text.replace("%", "%25").replace("/", "%2F") if "/" in text or "%" in text else text


def unescaped(text: str) -> str:
    return text.replace("%2F", "/").replace("%25", "%") if "%" in text else text


def prefix(kind: str, tenant_id: int, session_id: str) -> bytes:
    """Prefix of all records of one kind of one session, with the trailing slash."""
    return f"{kind}/{tenant_id}/{escaped(session_id)}/".encode()


def head_key(tenant_id: int, session_id: str) -> bytes:
    return f"{HEAD}/{tenant_id}/{escaped(session_id)}".encode()


def queue_key(tenant_id: int, session_id: str) -> bytes:
    return f"{QUEUE}/{tenant_id}/{escaped(session_id)}/list".encode()


def policy_key(tenant_id: int, version: int) -> bytes:
    return f"p/{tenant_id}/{version}".encode()


def policy_of(key: bytes) -> tuple[int, int] | None:
    """(tenant, version) of a policy key, else None."""
    if not key.startswith(b"p/"):
        return None
    _, tenant, version = key.split(b"/")
    return int(tenant), int(version)


def session_of(key: bytes) -> tuple[int, str] | None:
    """(tenant, session) of a session's record, else None."""
    if key[:2] not in _SESSION_KINDS:
        return None
    parts = key.split(b"/", 3)
    return int(parts[1]), unescaped(parts[2].decode())


def head_of(key: bytes) -> bytes | None:
    """The key of the head of the session whose record this is, else None; nothing else of it is looked at."""
    if key[:2] not in _SESSION_KINDS:
        return None
    middle = key.find(b"/", 2)
    if middle < 0:
        return None
    end = key.find(b"/", middle + 1)
    return b"s" + (key[1:] if end < 0 else key[1:end])


def pair(first: str, second: str) -> str:
    """The last part of a key made of two ids."""
    return f"{escaped(first)}/{escaped(second)}"
