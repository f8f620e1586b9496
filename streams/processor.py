"""The processor as a process: settings in, one engine on one log until it is told to stop.

Rule: stopping keeps the slot. A clean stop closes without leaving the group, so that a restart within the group session
reads again at once and nothing is moved, and leaves local archives behind for it; `drain` leaves, and the others take
over at once.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from confluent_kafka import KafkaException
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType

from onepen.processors.rules import Keys
from onepen.schemas.errors import Fatal
from onepen.schemas.policies import DEFAULT_POLICY
from onepen.streams import kafka_clients
from onepen.streams.core import SessionCore
from onepen.streams.engine import Engine
from onepen.streams.engine_settings import CONSUMER, EngineSettings
from onepen.streams.kafka import KafkaLog
from onepen.streams.kafka_config import admin_client, check_properties
from onepen.streams.kafka_topic_facts import KafkaTopicFacts
from onepen.streams.local_archive import LocalArchives
from onepen.streams.settings import Settings
from onepen.streams.state_file import StateHeader
from onepen.streams.store import PartitionStore
from onepen.streams.topic_admin import await_topics
from onepen.streams.watch_extra import require_extra

log = logging.getLogger("onepen.processor")

ASK_S: Final = 5.0
COLLECT_AFTER: Final = (50_000, 20, 100)


def run_processor(settings: Settings, stop: threading.Event, drain: threading.Event | None = None) -> None:
    """Decide inputs until `stop` is set; when `drain` is set as well, give the partitions away at once.

    Installs no signal handlers. A broker that is away is waited for. Raises `Fatal` when a person has to look or a
    restart is the cure, and `Invalid` for settings that cannot work; the message says what mends it.
    """
    check_properties(settings.kafka)
    keys = Keys(settings.token_key_name, settings.require_token_key())
    watch = _watch(settings)
    if not await_topics(settings, stop):
        return
    engine_settings = EngineSettings.from_settings(settings)
    if engine_settings.group_protocol == CONSUMER:
        warn_of_long_session(engine_settings)
    run_engine(engine_settings, keys, stop, drain, watch)


Watch = Callable[[Engine[Any], KafkaLog], AbstractContextManager[Any]]


def _watch(settings: Settings) -> Watch | None:
    """What shows the processor to others while it runs; None when nobody asked for it."""
    if settings.metrics_port is None:
        return None
    require_extra()
    from onepen.streams.engine_watch import watching

    return lambda engine, log_: watching(settings, engine, log_)


def run_engine(
    settings: EngineSettings,
    keys: Keys,
    stop: threading.Event,
    drain: threading.Event | None = None,
    watch: Watch | None = None,
) -> None:
    """`run_processor` behind its checks."""
    core = SessionCore(keys, settings.topics, settings.partitions)
    log_ = KafkaLog(settings)
    archives = local_archives(settings)
    engine = Engine(log_, core, settings, archives=archives)
    keep: list[tuple[StateHeader, PartitionStore[Any]]] = []
    log.info("processor of slot %s begins on %s", settings.slot, settings.bootstrap)
    try:
        with patient_collector(), watch(engine, log_) if watch is not None else nullcontext():
            engine.run(stop)
        if archives is not None and not (drain is not None and drain.is_set()):
            keep = archives.headers(engine.view().running)
    except Fatal:
        if not stop.is_set():
            raise
        log.warning("stopped while the brokers did not answer")
    finally:
        log_.close(leave=drain is not None and drain.is_set())
        log.info("processor of slot %s ended after %d inputs", settings.slot, engine.decided)
    # The partitions are free: nobody waits for the disk.
    if archives is not None:
        archives.write(keep)


@contextmanager
def patient_collector() -> Iterator[None]:
    """Look for cycles seldom: a batch makes thousands of objects that live until its commit and are freed by their
    counts, and looking through them again and again was an eighth of the processor's time."""
    with _patience.lock:
        if not _patience.engines:
            _patience.before = gc.get_threshold()
            gc.collect()
            gc.freeze()
            gc.set_threshold(*COLLECT_AFTER)
        _patience.engines += 1
    try:
        yield
    finally:
        with _patience.lock:
            _patience.engines -= 1
            if not _patience.engines:
                gc.set_threshold(*_patience.before)
                gc.unfreeze()


class _Patience:
    """Of this process: how many engines ask for it, and what there was before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engines = 0
        self.before = gc.get_threshold()


_patience = _Patience()


def local_archives(settings: EngineSettings) -> LocalArchives | None:
    """Those of the settings' folder; None where they name none."""
    if settings.archive_dir is None:
        return None
    return LocalArchives(settings.archive_dir, settings, KafkaTopicFacts(settings))


def warn_of_long_session(settings: EngineSettings, lease_ms: int = DEFAULT_POLICY.lease_ms) -> bool:
    """Under the consumer protocol the brokers set the group session: say so when a dead processor would be noticed
    later than a third of a lease. True when it was said."""
    session_ms = _broker_session_ms(settings)
    if session_ms is None or session_ms <= lease_ms // 3:
        return False
    log.warning(
        "group.consumer.session.timeout.ms of the brokers is %d ms, more than a third of a lease (%d ms): leases may "
        "end before the partitions of a dead processor are taken over",
        session_ms,
        lease_ms,
    )
    return True


def _broker_session_ms(settings: EngineSettings) -> int | None:
    admin = kafka_clients.admin(admin_client(settings))
    try:
        brokers = admin.list_topics(timeout=ASK_S).brokers
        resource = ConfigResource(ResourceType.BROKER, str(next(iter(brokers))))
        entries = admin.describe_configs([resource], request_timeout=ASK_S)[resource].result(ASK_S)
        return int(entries["group.consumer.session.timeout.ms"].value)
    except (KafkaException, KeyError, StopIteration, TimeoutError, ValueError) as error:
        log.warning("the brokers do not tell their group session: %s", error)
        return None
