"""What can be told of a session from the beginning of its head record, without reading the session.

Rule: for what is shown, never for what is decided. The order of the fields of `Head` up to `run` is part of the form
of the state, so they are found by their place; a test compares them.
"""

from __future__ import annotations

import msgspec

from onepen.schemas import codec


class _Glance(msgspec.Struct, array_like=True):
    """The beginning of a `Head`; what follows `run` is not looked at."""

    now_ms: msgspec.Raw = msgspec.Raw()
    run_no: msgspec.Raw = msgspec.Raw()
    last_hash: msgspec.Raw = msgspec.Raw()
    remembered: msgspec.Raw = msgspec.Raw()
    next_forget_ms: msgspec.Raw = msgspec.Raw()
    pending: msgspec.Raw = msgspec.Raw()
    run: msgspec.Raw = msgspec.Raw(b"\xc0")


_glance = msgspec.msgpack.Decoder(_Glance)


def has_run(raw: bytes) -> bool:
    """Whether a head record holds an active run, without reading the run. For what is shown: nothing is decided by it,
    and what cannot be read holds none."""
    place = codec.FRAME_BYTES
    try:
        for _ in range(3):  # deadline, version and length, three numbers in front of the body
            while raw[place] & 0x80:
                place += 1
            place += 1
        return bytes(_glance.decode(memoryview(raw)[place:]).run) != b"\xc0"
    except (msgspec.DecodeError, IndexError):
        return False
