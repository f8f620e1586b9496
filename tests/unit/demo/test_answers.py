"""What the audience is told about the answers and the views."""

import io

from rich.console import Console

from onepen.demo.answers import Agreement, print_agreement, print_answers
from onepen.demo.checks import answer_all
from onepen.demo.gather import Starts
from onepen.demo.recording import Summary
from tests.unit.demo.mutants import MUTANTS
from tests.unit.demo.test_checks import GOOD, STORY


def printed(show: object, *what: object) -> str:
    out = io.StringIO()
    assert callable(show)
    show(Console(file=out, width=100, markup=False, highlight=False), *what)
    return out.getvalue()


def test_green_answers_say_what_they_rest_on() -> None:
    text = printed(print_answers, answer_all(GOOD, STORY))
    assert text.count(" green ") == 8
    assert "RED" not in text
    assert "where r.run_key = $1 order by seq" in text
    assert "\x1b" not in text


def test_a_red_answer_says_what_speaks_against_it() -> None:
    damaged = MUTANTS["a_mail_sent_twice"][0](GOOD)
    text = printed(print_answers, answer_all(damaged, STORY))
    assert "7 RED" in text
    assert "! effects: ledger 2 (send_mail m2): done before" in text


def agreement(sql_completed: int = 2, sql_active: int = 0) -> Agreement:
    key = (1_800_000_000_000, "completed")
    return Agreement({0: 12}, 0, sql_active, {key: 2}, {key: sql_completed})


def test_views_agree_only_when_all_figures_do() -> None:
    assert agreement().holds
    assert not agreement(sql_completed=1).holds
    assert not agreement(sql_active=1).holds
    assert "views agree: Faust beside SQL, both past events 0:12" in printed(print_agreement, agreement())
    assert "views DIFFER" in printed(print_agreement, agreement(sql_completed=1))


def test_a_summary_has_its_rates() -> None:
    starts = Starts({}, {}, {})
    text = str(Summary(("a", "b"), 4, {"completed": 4}, 40, 80, 2.0, starts, ()))
    assert text == (
        "2 sessions, 4 turns: 4 completed; 40 input records, 80 events in 2.0 s "
        "(2.0 runs/s, 20.0 inputs/s, 40.0 events/s)"
    )
