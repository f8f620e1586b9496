"""What `Client` and `AsyncClient` share: the calls, each making one request for `send`, and what a handle names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack

from onepen.schemas.edge import Pointer, Request, parse_request
from onepen.schemas.errors import Invalid
from onepen.schemas.inputs import Input

H = TypeVar("H")


class Origin(TypedDict, total=False):
    """Who asks. `input_id` with `issued_at_ms` are minted when absent; give both only to repeat an input."""

    source: str
    tenant_id: int
    user_id: int
    input_id: str
    issued_at_ms: int
    traceparent: str


class ContentOptions(Origin, total=False):
    """Options of inputs with content, as in protocol section 4. `timeout_ms` is the run's.

    `expected_run_id` goes with `steer`, `auto` and `on_busy="steer"`; `erasable` sends the content as an object with
    pointer and digest (by default as the settings say).
    """

    pointer: Pointer
    media_type: str
    on_busy: Literal["queue", "reject", "steer", "interrupt"]
    if_missed: Literal["queue", "reject"]
    ttl_ms: int
    expected_run_id: str
    retry_of: str
    recovery: Literal["resume", "rerun", "fail"]
    timeout_ms: int
    max_attempts: int
    erasable: bool


class Handle:
    """The record of one input and what identifies it, from before anything was sent."""

    def __init__(self, record: Input) -> None:
        self.record = record

    @property
    def input_id(self) -> str:
        """The id under which the log knows this input, the same on every repeat."""
        return self.record.input_id

    @property
    def issued_at_ms(self) -> int:
        """Minted with the id; sent unchanged on every repeat."""
        return self.record.issued_at_ms

    @property
    def session_id(self) -> str:
        return self.record.session_id

    @property
    def tenant_id(self) -> int:
        return self.record.tenant_id


class Calls(ABC, Generic[H]):
    """One method per mode. None waits for the broker; all raise `Invalid` for what breaks a rule of form."""

    @abstractmethod
    def send(self, request: Request, *, traceparent: str | None = None) -> H:
        """Send a request; answers its handle at once."""

    @abstractmethod
    def resend(self, sent: H) -> H:
        """Send the same record again, unchanged; answers the same handle."""

    def prompt(self, session_id: str, content: Any = None, **options: Unpack[ContentOptions]) -> H:
        """Ask for a run of the session. `content` is text, a JSON value or bytes. While another one is active it goes
        by `on_busy`: `queue`, `reject`, `steer`, or `interrupt` (cancels the active run and starts next)."""
        return self._content("prompt", session_id, content, options)

    def steer(self, session_id: str, content: Any = None, **options: Unpack[ContentOptions]) -> H:
        """Hand something to the run that is active now."""
        return self._content("steer", session_id, content, options)

    def follow_up(self, session_id: str, content: Any = None, **options: Unpack[ContentOptions]) -> H:
        """Ask for the run after the active one."""
        return self._content("follow_up", session_id, content, options)

    def auto(self, session_id: str, content: Any = None, **options: Unpack[ContentOptions]) -> H:
        """One send button: it starts a run, or by its source (`ui` and `remote`, unless the policy says otherwise)
        steers the active one, or else is queued behind it."""
        return self._content("auto", session_id, content, options)

    def retry(self, session_id: str, run_id: str, **options: Unpack[ContentOptions]) -> H:
        """A prompt that repeats the session's last run, if that ended `timed_out` or `failed {retryable}`: with its
        content, options and action keys, so that what was performed is not performed again."""
        options["retry_of"] = run_id
        return self._request("prompt", session_id, {}, options)

    def abort(
        self,
        session_id: str,
        *,
        run_id: str | None = None,
        target_input_id: str | None = None,
        active: bool = False,
        scope: Literal["run", "run_and_queue"] | None = None,
        reason: str | None = None,
        **origin: Unpack[Origin],
    ) -> H:
        """Stop a run, withdraw an input, or stop whatever is `active`: exactly one of the three is named."""
        named = [run_id is not None, target_input_id is not None, active]
        if named.count(True) != 1:
            sentence = "target_kind: name exactly one of run_id, target_input_id, active"
            raise Invalid(sentence, field="target_kind")
        kind = ("run", "input", "active")[named.index(True)]
        fields = {
            "target_kind": kind,
            "target_id": run_id if kind == "run" else target_input_id,
            "scope": scope,
            "reason": reason,
        }
        return self._request("abort", session_id, fields, origin)

    def answer(
        self,
        session_id: str,
        *,
        action_key: str,
        args_digest: str,
        decision: Literal["approve", "deny", "ok", "error", "not_performed"],
        action_name: str | None = None,
        reason: str | None = None,
        **origin: Unpack[Origin],
    ) -> H:
        """Answer an approval (`approve`, `deny`), or settle an action that is in doubt after its run by what has been
        found out (`ok`, `error`, `not_performed`). Key, digest and name are those of its `action.requested`."""
        fields = {
            "action_key": action_key,
            "action_name": action_name,
            "args_digest": args_digest,
            "decision": decision,
            "reason": reason,
        }
        return self._request("answer", session_id, fields, origin)

    def erase(self, session_id: str, *, reason: str | None = None, **origin: Unpack[Origin]) -> H:
        """Erase the session for ever: what it holds is cancelled and removed, and its id is never used again. The
        disposition `done` comes after the end of the active run."""
        return self._request("erase", session_id, {"reason": reason}, origin)

    def _content(self, mode: str, session_id: str, content: Any, options: ContentOptions) -> H:
        return self._request(mode, session_id, {"content": content}, options)

    def _request(self, mode: str, session_id: str, fields: dict[str, Any], options: Origin) -> H:
        given = {name: value for name, value in {**fields, **options}.items() if value is not None}
        traceparent = given.pop("traceparent", None)
        request = parse_request({"mode": mode, "session_id": session_id, **given})
        return self.send(request, traceparent=traceparent)
