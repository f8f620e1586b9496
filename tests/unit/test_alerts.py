"""The alert rules name metrics that exist and say what to do. For commands see unit/cli/test_named_commands.py."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from onepen.schemas.topics import Topics
from onepen.streams.counters import EngineCounters, LogCounters
from onepen.streams.engine_view import View
from onepen.streams.engine_watch import EngineWatch
from onepen.streams.feed_watch import FeedWatch
from onepen.streams.kafka_statistics import StatisticsTexts

ALERTS = Path(__file__).parents[2] / "infra" / "alerts.yml"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
TOPICS = Topics("t")

Rule = dict[str, Any]


def rules() -> list[Rule]:
    loaded = yaml.safe_load(ALERTS.read_text("utf-8"))
    assert set(loaded) == {"groups"}
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def labels_of_metrics() -> dict[str, tuple[str, ...]]:
    """Every time series that processor and sink show, with its labels."""
    texts = StatisticsTexts(1_000)
    log = SimpleNamespace(statistics=texts, counters=LogCounters(), held=0)
    view: View[Any] = View((), (), (), (), {})
    engine = SimpleNamespace(counters=EngineCounters(), decided=0, view=lambda: view)
    processor = EngineWatch(engine, log, TOPICS.inputs)  # type: ignore[arg-type]
    counters = SimpleNamespace(
        turned_s=0.0, records=0, batch_ms=EngineCounters().transaction_ms, batch_records=EngineCounters().recovery_ms,
        fenced=0, dead_letters={}, assigned=0,
    )  # fmt: skip
    feed = SimpleNamespace(counters=counters, places=dict, statistics=texts, busy=False)
    sink = FeedWatch(feed, SimpleNamespace(topics=TOPICS))  # type: ignore[arg-type]
    return {
        family.name + suffix: tuple(family._labelnames)  # type: ignore[attr-defined]
        for watch in (processor, sink)
        for family in watch.collect()
        for suffix in SUFFIXES[family.type]
    }


def unknown_metrics(text: str) -> set[str]:
    return set(re.findall(r"\bonepen_\w+", text)) - set(labels_of_metrics())


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_names_what_exists_and_says_what_to_do(rule: Rule) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert unknown_metrics(rule["expr"]) == set()
    known = labels_of_metrics()
    for name, matchers in re.findall(r"\b(onepen_\w+)\{([^}]*)\}", rule["expr"]):
        assert {re.split("[=!]", matcher)[0].strip() for matcher in matchers.split(",")} <= set(known[name])
    grouped = {
        label.strip() for inside in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]) for label in inside.split(",")
    }
    used = {label for name in re.findall(r"\bonepen_\w+", rule["expr"]) for label in known[name]}
    assert grouped <= used | {"instance"}
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert shown <= grouped, "a label that the expression leaves out would be empty"
    assert rule["expr"].count("(") == rule["expr"].count(")")
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(rule["annotations"]) == {"summary", "do"}
    # In a sentence a metric may stand for all its series.
    families = {re.sub("_(total|bucket|sum|count)$", "", name) for name in known}
    assert unknown_metrics(rule["annotations"]["do"]) <= families
    assert rule["annotations"]["do"].endswith(".")
    assert rule["annotations"]["summary"].endswith(".")


def test_names_are_unique_and_wrong_ones_are_found() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) > 10
    assert unknown_metrics("rate(onepen_transactions[5m])") == {"onepen_transactions"}, "a counter is shown as _total"
    assert unknown_metrics("onepen_lag_records") == set()
