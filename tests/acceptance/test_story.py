"""The founding story on the real thing, judged from outside."""

import io
import shutil

import pytest
from rich.console import Console

from onepen.demo import story
from onepen.demo.cast import Cast
from onepen.demo.checks import answer_all, exit_code
from onepen.demo.story import play, tell
from onepen.schemas.errors import Fatal
from onepen.streams.process_identity import ProcessIdentity, identify, is_running
from tests.acceptance.damage import damaged
from tests.acceptance.pipeline import Pipeline

SECONDS_MAX = 45


def stage() -> Console:
    return Console(file=io.StringIO(), width=150, markup=False, highlight=False)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_story_is_green_twice_over(pipeline: Pipeline) -> None:
    """Twice on the same data: new sessions, the policy of the first time still in force."""
    told = tell(pipeline.settings, stage())
    assert [f"{a.question}: {v}" for a in told.answers for v in a.violations] == []
    assert told.agreement.holds
    assert told.exit_code == 0
    for what, question, copy in damaged(told.evidence):
        answers = answer_all(copy, told.expected)
        assert not answers[question - 1].green, f"{what} was not noticed by question {question}"
        assert exit_code(answers) == 1

    console = stage()
    code = play(pipeline.settings, console, once=True)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    print(text)
    assert code == 0
    assert "8 of 8 answers green" in text
    assert "views agree" in text
    assert "\x1b" not in text, "no control characters without a terminal"
    assert told.seconds <= SECONDS_MAX
    assert float(text.rsplit("answers green, ", 1)[1].split(" s")[0]) <= SECONDS_MAX


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_story_without_a_processor_breaks_off_and_leaves_nobody(
    pipeline_at_rest: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ProcessIdentity] = []

    class Watched(Cast):
        def start_workers(self, count: int, mail_address: str, nonce: str) -> list[int]:
            pids = super().start_workers(count, mail_address, nonce)
            seen.extend(found for pid in pids if (found := identify(pid)) is not None)
            return pids

    monkeypatch.setattr(story, "Cast", Watched)
    with pytest.raises(Fatal, match="policy was not taken") as caught:
        tell(pipeline_at_rest.settings, stage())
    assert len(seen) == story.WORKERS
    assert not [one for one in seen if is_running(one)]
    (note,) = caught.value.__notes__
    shutil.rmtree(note.rsplit(" ", 1)[1])
