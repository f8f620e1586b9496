"""Recorded agent sessions as data: one JSON object per line, `session` and `messages` in the chat-completions shape.

Rule: a line is read strictly or refused with its number; nothing is guessed at. One user message with everything up to
the next one is a turn, and each turn becomes one run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepen.schemas import strict_json
from onepen.schemas.errors import Invalid

__all__ = ["STATE_CHANGING", "Recording", "Reply", "ToolCall", "Turn", "read_recordings"]

STATE_CHANGING = ("book_", "cancel_", "update_", "send_", "transfer_")
"""Tools whose names begin so change the world: they go through the action gate."""

LINE_BYTES_MAX = 4 * 1024 * 1024
_TEXT_MAX = 160


@dataclass(frozen=True)
class ToolCall:
    """A recorded tool call with its recorded result (None when the recording ends before it)."""

    call_id: str
    name: str
    arguments: Any
    result: str | None

    @property
    def changes_state(self) -> bool:
        return self.name.startswith(STATE_CHANGING)


@dataclass(frozen=True)
class Reply:
    """One assistant message: its text, if any, and the tools it called."""

    content: str | None
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class Turn:
    """One user message and what the agent did about it, in order."""

    prompt: str
    replies: tuple[Reply, ...]


@dataclass(frozen=True)
class Recording:
    """One recorded session."""

    name: str
    turns: tuple[Turn, ...]


def read_recordings(path: Path, *, sessions: int | None = None) -> list[Recording]:
    """The recordings of a file, the first `sessions` of them if given. Raises `Invalid` naming the line."""
    try:
        with path.open("rb") as file:
            return list(_read(file, str(path), sessions))
    except OSError as error:
        raise Invalid(f"{path}: {error.strerror}", field="recording") from None


def _read(lines: Iterable[bytes], name: str, sessions: int | None) -> Iterator[Recording]:
    count = 0
    for number, line in enumerate(lines, 1):
        if sessions is not None and count >= sessions:
            return
        if not line.strip():
            continue
        try:
            yield _recording(line)
        except Invalid as error:
            raise Invalid(f"{name}, line {number}: {error}", field="recording") from None
        count += 1
    if not count:
        raise Invalid(f"{name}: no recorded session in it", field="recording")


def _recording(line: bytes) -> Recording:
    if len(line) > LINE_BYTES_MAX:
        raise Invalid(f"longer than {LINE_BYTES_MAX} bytes")
    document = strict_json.parse(line, "line")
    if not isinstance(document, dict):
        raise Invalid("must be a JSON object")
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Invalid("messages: must be a list with at least one message")
    results: dict[str, list[str]] = {}
    for index, message in enumerate(messages):
        _check_message(message, index)
        if message["role"] == "tool":
            results.setdefault(message["tool_call_id"], []).append(message["content"] or "")
    return Recording(_text(document, "session", "session"), tuple(_turns(messages, results)))


def _turns(messages: list[dict[str, Any]], results: dict[str, list[str]]) -> Iterator[Turn]:
    prompt: str | None = None
    replies: list[Reply] = []
    for index, message in enumerate(messages):
        if message["role"] == "user":
            if prompt is not None:
                yield Turn(prompt, tuple(replies))
            prompt, replies = message["content"] or "", []
        elif message["role"] == "assistant":
            if prompt is None:
                raise Invalid(f"messages[{index}]: an assistant message before the first user message")
            calls = [_call(c, f"messages[{index}]", results) for c in message.get("tool_calls") or []]
            replies.append(Reply(message["content"], tuple(calls)))
    if prompt is None:
        raise Invalid("messages: no user message")
    yield Turn(prompt, tuple(replies))


def _check_message(message: object, index: int) -> None:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise Invalid(f"{where}: must be a JSON object")
    role = message.get("role")
    if role not in ("user", "assistant", "tool", "system"):
        raise Invalid(f"{where}.role: must be user, assistant, tool or system, not {str(role)[:_TEXT_MAX]!r}")
    if not isinstance(message.setdefault("content", None), str | None):
        raise Invalid(f"{where}.content: must be text or null")
    if role == "tool":
        _text(message, "tool_call_id", where)
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise Invalid(f"{where}.tool_calls: must be a list")


def _call(call: object, where: str, results: dict[str, list[str]]) -> ToolCall:
    """Flat ({id, name, arguments}) or as the API has it ({id, function: {name, arguments}})."""
    if not isinstance(call, dict):
        raise Invalid(f"{where}.tool_calls: must hold JSON objects")
    inner = call.get("function", call)
    if not isinstance(inner, dict):
        raise Invalid(f"{where}.tool_calls: function must be a JSON object")
    call_id, name = _text(call, "id", f"{where}.tool_calls"), _text(inner, "name", f"{where}.tool_calls")
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        # Recorded models do write broken JSON: it stays the text that it was.
        with contextlib.suppress(Invalid):
            arguments = strict_json.parse(arguments, "arguments") if arguments else None
    waiting = results.get(call_id)
    return ToolCall(call_id, name, arguments, waiting.pop(0) if waiting else None)


def _text(document: dict[str, Any], member: str, where: str) -> str:
    value = document.get(member)
    if not isinstance(value, str) or not value:
        raise Invalid(f"{where}: {member} must be text")
    return value
