"""When a killed broker's former self counts as dead: on the controller's own words, in the order in which it says them.
That nothing hangs after a kill is shown on real brokers by `tests/integration/test_engine_outage.py`."""

from __future__ import annotations

from pathlib import Path

from onepen.streams.broker_start import ended_uncleanly, fenced_for_good, read_settings

ACTIVE = "Activated periodic tasks: electPreferred, maybeFenceStaleBroker, writeNoOpRecord\n"
EARLIER = "[QuorumController id=1] Completing purgatory items up to offset 90 and epoch 3.\n"
SAID = "Fencing broker 1 at epoch 12 because its session has timed out.\n"
WRITTEN = "Read-write operation maybeFenceStaleBroker(590449932) will be completed when the log reaches offset 97.\n"
TOO_EARLY = "[QuorumController id=1] Completing purgatory items up to offset 96 and epoch 3.\n"
COMMITTED = "[QuorumController id=1] Completing purgatory items up to offset 97 and epoch 3.\n"


def test_it_is_dead_only_when_that_is_committed() -> None:
    told = ""
    for line in (ACTIVE, EARLIER, SAID, WRITTEN, TOO_EARLY):
        told += line
        assert not fenced_for_good(told), line
    assert fenced_for_good(told + COMMITTED)


def test_a_mark_tells_an_end_in_order(tmp_path: Path) -> None:
    assert not ended_uncleanly(tmp_path), "never used"
    (tmp_path / "__cluster_metadata-0").mkdir()
    assert ended_uncleanly(tmp_path)
    (tmp_path / ".kafka_cleanshutdown").write_text("{}")
    assert not ended_uncleanly(tmp_path)


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "server.properties"
    path.write_text("listeners=PLAINTEXT://127.0.0.1:1,CONTROLLER://127.0.0.1:2\nx=a=b\n")
    assert read_settings(path) == {"listeners": "PLAINTEXT://127.0.0.1:1,CONTROLLER://127.0.0.1:2", "x": "a=b"}
