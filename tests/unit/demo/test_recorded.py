"""Recordings as data: what is read, and what is refused with the number of its line."""

import json
from pathlib import Path
from typing import Any

import pytest

from onepen.demo.recorded import read_recordings
from onepen.demo.recording import SHIPPED
from onepen.schemas.errors import Invalid

USER = {"role": "user", "content": "Hello"}
BYE = {"role": "assistant", "content": "Bye"}


def call(call_id: str, name: str, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": call_id, "name": name, "arguments": arguments}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": "x", "content": content}


def written(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", "utf-8")
    return path


def one(tmp_path: Path, *messages: dict[str, Any]) -> Any:
    return read_recordings(written(tmp_path / "r.jsonl", {"session": "s", "messages": list(messages)}))[0]


def test_a_user_message_with_all_up_to_the_next_is_a_turn(tmp_path: Path) -> None:
    asks = {"role": "assistant", "content": None, "tool_calls": [call("c1", "find"), call("c2", "book_room")]}
    system = {"role": "system", "content": "be brief"}
    recording = one(tmp_path, system, USER, asks, result("c2", "booked"), result("c1", "found"), BYE, USER)
    assert [turn.prompt for turn in recording.turns] == ["Hello", "Hello"]
    first, second = recording.turns
    assert [reply.content for reply in first.replies] == [None, "Bye"]
    assert [(c.name, c.result, c.changes_state) for c in first.replies[0].calls] == [
        ("find", "found", False),
        ("book_room", "booked", True),
    ]
    assert second.replies == ()


def test_a_call_id_used_again_gets_its_own_result(tmp_path: Path) -> None:
    asks = {"role": "assistant", "content": None, "tool_calls": [call("c", "find")]}
    recording = one(tmp_path, USER, asks, result("c", "first"), asks, result("c", "second"), asks)
    assert [c.result for reply in recording.turns[0].replies for c in reply.calls] == ["first", "second", None]


def test_both_shapes_of_calls_and_arguments(tmp_path: Path) -> None:
    nested = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    calls = [nested, call("d", "g", {"b": 2}), call("e", "h", "{broken")]
    recording = one(tmp_path, USER, {"role": "assistant", "content": "", "tool_calls": calls})
    assert [c.arguments for c in recording.turns[0].replies[0].calls] == [{"a": 1}, {"b": 2}, "{broken"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "line 2"),
        ("[]", "must be a JSON object"),
        ({"session": "s"}, "messages: must be a list"),
        ({"session": "s", "messages": []}, "at least one"),
        ({"messages": [USER]}, "session must be text"),
        ({"session": "s", "messages": ["x"]}, "messages[0]: must be a JSON object"),
        ({"session": "s", "messages": [{"role": "robot", "content": "x"}]}, "'robot'"),
        ({"session": "s", "messages": [{"role": "user", "content": 5}]}, "content: must be text or null"),
        ({"session": "s", "messages": [BYE]}, "before the first user message"),
        ({"session": "s", "messages": [{"role": "system", "content": "x"}]}, "no user message"),
        ({"session": "s", "messages": [USER, {"role": "tool", "content": "x"}]}, "tool_call_id must be text"),
        ({"session": "s", "messages": [USER, {**BYE, "tool_calls": {}}]}, "tool_calls: must be a list"),
        ({"session": "s", "messages": [USER, {**BYE, "tool_calls": [{"id": "c"}]}]}, "name must be text"),
        ('{"session": "s", "session": "t", "messages": []}', "line 2"),
        ("{}\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "line 2"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, bad: object, says: str) -> None:
    path = written(tmp_path / "r.jsonl", {"session": "s", "messages": [USER]}, bad)
    with pytest.raises(Invalid) as caught:
        read_recordings(path)
    assert "r.jsonl, line 2: " in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_so_many_sessions_are_read(tmp_path: Path) -> None:
    good = {"session": "s", "messages": [USER]}
    path = written(tmp_path / "r.jsonl", good, "", good, "{")
    assert len(read_recordings(path, sessions=2)) == 2


def test_a_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="No such file"):
        read_recordings(tmp_path / "absent.jsonl")
    with pytest.raises(Invalid, match="no recorded session"):
        read_recordings(written(tmp_path / "empty.jsonl"))


def test_the_shipped_recording_has_tools_actions_and_a_turn_without_answer() -> None:
    recordings = read_recordings(SHIPPED)
    turns = [turn for one in recordings for turn in one.turns]
    calls = [c for turn in turns for reply in turn.replies for c in reply.calls]
    assert len(recordings) >= 3
    assert {c.changes_state for c in calls} == {True, False}
    assert any(not turn.replies for turn in turns)
    assert all(c.result is not None for c in calls)
