"""What users hand to clients and the command line, judged before anything is sent.

Rule: strict types, no conversion, one clear sentence per error naming the field. Whatever passes here becomes
an `inputs.Input` that every other part accepts in form; whether it is admitted is decided by the log.
`input_id` and `issued_at_ms` are minted here, once: a repeat sends the same record again.
"""

from __future__ import annotations

import re
import time
import uuid
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from onepen.schemas import codec, strict_json
from onepen.schemas.errors import Invalid
from onepen.schemas.ids import INT64_MAX, INT64_MIN, check_id
from onepen.schemas.inputs import JSON, OPAQUE, TEXT, Content, Input
from onepen.schemas.limits import DURATION_MS_MAX, RECORD_BYTES_MAX

SOURCE_CHARS_MAX: Final = 128
REASON_CHARS_MAX: Final = 1024
URI_CHARS_MAX: Final = 2048
DEFAULT_SOURCE: Final = "sdk"

_SHA256 = re.compile(r"(sha256:)?[0-9a-f]{64}")
_MEDIA_TYPE = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,63}/[a-z0-9][a-z0-9!#$&^_.+-]{0,63}")

_CONTENT_MODES = frozenset({"prompt", "steer", "follow_up", "auto"})
_ONLY_CONTENT = (
    "content", "pointer", "on_busy", "if_missed", "ttl_ms", "retry_of", "recovery", "expected_run_id",
    "timeout_ms", "max_attempts",
)  # fmt: skip
_ONLY_ABORT = ("target_kind", "target_id", "scope")
_ONLY_ANSWER = ("action_key", "action_name", "args_digest", "decision")
_OF_MODE: Final = {
    **dict.fromkeys(_CONTENT_MODES, (*_ONLY_CONTENT, "media_type", "erasable")),
    "abort": _ONLY_ABORT,
    "answer": _ONLY_ANSWER,
    "erase": (),
}


def _id(text: str) -> str:
    return check_id(text, "id")


def _text(text: str) -> str:
    strict_json.check(text, "text")
    return text


def _sha256(text: str) -> str:
    if _SHA256.fullmatch(text) is None:
        raise ValueError("must be a SHA-256 as 64 hex digits in lower case")
    return text


Id = Annotated[str, AfterValidator(_id)]
Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
DurationMs = Annotated[int, Field(ge=1, le=DURATION_MS_MAX)]
Reason = Annotated[str, Field(min_length=1, max_length=REASON_CHARS_MAX), AfterValidator(_text)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)


class Pointer(_Strict):
    """Content that lies elsewhere: where, its SHA-256, its size and its media type."""

    uri: Annotated[str, Field(min_length=1, max_length=URI_CHARS_MAX), AfterValidator(_text)]
    digest: Annotated[str, AfterValidator(_sha256)]
    size_bytes: Annotated[int, Field(ge=0, le=INT64_MAX)]
    media_type: str = OPAQUE


class Request(_Strict):
    """One input as a user gives it; the members are those of protocol section 4, unused ones stay away.

    `content` is text, a JSON value or bytes; `pointer` stands in its place for content that lies elsewhere. A prompt
    with `retry_of` has neither: it takes over what the named run was asked. `erasable` asks the client to store the
    content as an object, so that nothing but pointer and digest enters the log. Who the parent of a run is (`parent`)
    is known to the log only and no member of a request.
    """

    mode: Literal["prompt", "steer", "follow_up", "auto", "abort", "answer", "erase"]
    session_id: Id
    source: Annotated[str, Field(min_length=1, max_length=SOURCE_CHARS_MAX), AfterValidator(_text)] = DEFAULT_SOURCE
    tenant_id: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    user_id: Int64 | None = None
    input_id: Id | None = None
    issued_at_ms: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    content: Any = None
    pointer: Pointer | None = None
    media_type: str | None = None
    on_busy: Literal["queue", "reject", "steer", "interrupt"] | None = None
    if_missed: Literal["queue", "reject"] | None = None
    ttl_ms: DurationMs | None = None
    expected_run_id: Id | None = None
    retry_of: Id | None = None
    recovery: Literal["resume", "rerun", "fail"] | None = None
    timeout_ms: DurationMs | None = None
    max_attempts: Annotated[int, Field(ge=1, le=100)] | None = None
    target_kind: Literal["run", "input", "active"] | None = None
    target_id: Id | None = None
    scope: Literal["run", "run_and_queue"] | None = None
    reason: Reason | None = None
    action_key: Id | None = None
    action_name: Id | None = None
    args_digest: Id | None = None
    decision: Literal["approve", "deny", "ok", "error", "not_performed"] | None = None
    erasable: bool | None = None

    @model_validator(mode="after")
    def _fits_its_mode(self) -> Request:
        given = self.model_fields_set
        self._refuse_foreign(given)
        if self.mode in _CONTENT_MODES:
            self._check_content(given)
        elif self.mode == "abort":
            self._check_target()
        elif self.mode == "answer":
            for name in ("action_key", "args_digest", "decision"):
                _require(getattr(self, name) is not None, name, "an answer needs it")
        return self

    def _refuse_foreign(self, given: set[str]) -> None:
        allowed = _OF_MODE[self.mode]
        for name in (*_ONLY_CONTENT, "media_type", "erasable", *_ONLY_ABORT, *_ONLY_ANSWER):
            if name in given and name not in allowed and getattr(self, name) is not None:
                raise Invalid(f"{name}: has no meaning in mode {self.mode}", field=name)
        if self.reason is not None and self.mode in _CONTENT_MODES:
            raise Invalid(f"reason: has no meaning in mode {self.mode}", field="reason")

    def _check_content(self, given: set[str]) -> None:
        by_value = "content" in given and self.content is not None
        if self.expected_run_id is not None:
            may_steer = self.mode in ("steer", "auto") or self.on_busy == "steer"
            _require(may_steer, "expected_run_id", "goes with steer, auto, or on_busy steer only")
        if self.retry_of is not None:
            _require(self.mode == "prompt", "retry_of", "only a prompt can retry a run")
            nothing = not by_value and self.pointer is None and self.media_type is None
            _require(nothing, "retry_of", "a retry takes over the content of its run; give none")
            _require(self.erasable is None, "erasable", "a retry has no content of its own")
            return
        _require(by_value or self.pointer is not None, "content", f"{_article(self.mode)} needs content or a pointer")
        _require(not (by_value and self.pointer is not None), "pointer", "content is given too; one of them")
        if self.media_type is not None:
            _require(isinstance(self.content, bytes), "media_type", "goes with content that is bytes only")
            well_formed = _MEDIA_TYPE.fullmatch(self.media_type) is not None
            _require(well_formed, "media_type", "must be like application/pdf")
            _require(self.media_type not in (TEXT, JSON), "media_type", f"give {self.media_type} as a value")

    def _check_target(self) -> None:
        _require(self.target_kind is not None, "target_kind", "an abort names its target: run, input or active")
        if self.target_kind == "active":
            _require(self.target_id is None, "target_id", "has no meaning with target_kind active")
        else:
            _require(self.target_id is not None, "target_id", f"an abort of one {self.target_kind} names it")

    def to_input(self, *, tenant_id: int, user_id: int) -> Input:
        """The record; mints `input_id` and `issued_at_ms` where the user gave none. Raises `Invalid`."""
        fields = self.model_dump(exclude_none=True, exclude={"content", "pointer", "media_type", "erasable"})
        fields.setdefault("tenant_id", tenant_id)
        fields.setdefault("user_id", user_id)
        fields.setdefault("input_id", new_input_id())
        fields.setdefault("issued_at_ms", time.time_ns() // 1_000_000)
        if self.mode in _CONTENT_MODES and self.retry_of is None:
            fields["content"] = self._content()
        return Input(**fields)

    def _content(self) -> Content:
        if self.pointer is not None:
            where = self.pointer
            return Content(media_type=where.media_type, uri=where.uri, digest=where.digest, size_bytes=where.size_bytes)
        return to_content(self.content, media_type=self.media_type)


def _article(mode: str) -> str:
    return f"an {mode}" if mode == "auto" else f"a {mode}"


def _require(holds: bool, field: str, sentence: str) -> None:
    if not holds:
        raise Invalid(f"{field}: {sentence}", field=field)


def new_input_id() -> str:
    """A fresh input id; the caller keeps it for every repeat."""
    return f"in-{uuid.uuid4().hex}"


def to_content(value: Any, *, media_type: str | None = None, field: str = "content") -> Content:
    """Text becomes text/plain, any other JSON value canonical JSON, bytes stay opaque (of `media_type`, if given).

    Raises `Invalid` naming the member that is not strict JSON or not valid Unicode.
    """
    if isinstance(value, bytes):
        return Content(media_type=media_type or OPAQUE, data=value)
    strict_json.check(value, field)
    if isinstance(value, str):
        return Content(media_type=TEXT, data=value.encode())
    return Content(media_type=JSON, data=strict_json.canonical(value))


def content_value(content: Content | None) -> Any:
    """The other way: text, JSON value or bytes; None when there is no content by value."""
    if content is None or content.data is None:
        return None
    if content.media_type == TEXT:
        return content.data.decode("utf-8", "replace")
    if content.media_type == JSON:
        return msgspec.json.decode(content.data)
    return content.data


def parse_request(fields: dict[str, Any]) -> Request:
    """A request from plain members. Raises `Invalid`: one sentence naming the field."""
    try:
        return Request(**fields)
    except ValidationError as error:
        raise _one_sentence(error) from None
    except TypeError as error:
        raise Invalid(f"request: {error}", field="request") from None


def request_from_json(line: bytes | str) -> Request:
    """A request from one line of JSON, read strictly. Raises `Invalid`."""
    value = strict_json.parse(line, "request")
    if not isinstance(value, dict):
        raise Invalid("request: must be a JSON object", field="request")
    return parse_request(value)


def encode_input(record: Input) -> bytes:
    """The framed bytes of a record. Raises `Invalid` with both sizes when it is larger than allowed."""
    data = codec.encode(record)
    if len(data) > RECORD_BYTES_MAX:
        raise Invalid(
            f"content: the record is {len(data)} bytes encoded, {RECORD_BYTES_MAX} are allowed;"
            " name an object store (ONEPEN_OBJECTS_ROOT), or store the content elsewhere and send a pointer"
            " (uri, digest, size_bytes)",
            field="content",
        )
    return data


def _one_sentence(error: ValidationError) -> Invalid:
    problem = error.errors(include_input=False, include_url=False)[0]
    field = ".".join(str(part) for part in problem["loc"]) or "request"
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, Invalid) and not problem["loc"]:
        return cause
    message = problem["msg"].removeprefix("Value error, ")
    if isinstance(cause, Invalid):
        message = message.split(": ", 1)[-1]
    message = message.replace("Input should be", "must be").replace("String should have", "must have")
    if problem["type"] == "extra_forbidden":
        message = "is no member of a request"
    elif problem["type"] == "missing":
        message = "is missing"
    return Invalid(f"{field}: {message[:1].lower()}{message[1:]}", field=field)
