"""The embedded services as children of the supervisor.

Rule: the service is prepared by the caller first (that can take long and fail with a sentence for the
terminal); a child is what is left to run.
"""

from __future__ import annotations

from onepen.sinks import embedded_postgres
from onepen.sinks.embedded_postgres import EmbeddedPostgres
from onepen.streams.embedded_kafka import EmbeddedKafka, kafka_answers
from onepen.streams.supervisor import Child

__all__ = ["kafka_child", "postgres_child"]

READY_QUESTION_MS = 1_000


def kafka_child(kafka: EmbeddedKafka, name: str = "kafka") -> Child:
    """A prepared broker as a child; ready when it answers."""
    bootstrap = kafka.bootstrap
    return Child(name, kafka.command(), ready=lambda: kafka_answers(bootstrap, READY_QUESTION_MS))


def postgres_child(postgres: EmbeddedPostgres, name: str = "postgres") -> Child:
    """A prepared server as a child; ready when it accepts connections."""
    return Child(
        name,
        postgres.command(),
        ready=lambda: postgres.answers(READY_QUESTION_MS),
        user=postgres.system_user,
        stop_signal=embedded_postgres.STOP_SIGNAL,
        death_signal=embedded_postgres.DEATH_SIGNAL,
    )
