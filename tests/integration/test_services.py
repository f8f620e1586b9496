"""The fixtures themselves: real servers, isolated from test to test."""

import asyncpg
from confluent_kafka.admin import AdminClient

from tests.services import execute, run_coroutine


def test_the_broker_answers(kafka_bootstrap: str) -> None:
    assert AdminClient({"bootstrap.servers": kafka_bootstrap}).list_topics(timeout=10).brokers


def test_a_fresh_database_is_empty_and_one_of_its_own(fresh_dsn: str, postgres_dsn: str) -> None:
    async def names() -> tuple[str, int]:
        connection = await asyncpg.connect(fresh_dsn)
        try:
            name = await connection.fetchval("select current_database()")
            tables = await connection.fetchval("select count(*) from pg_tables where schemaname = 'public'")
        finally:
            await connection.close()
        return name, tables

    assert fresh_dsn != postgres_dsn
    execute(fresh_dsn, "create table marks (n int)")
    name, tables = run_coroutine(names)
    assert name.startswith("test_")
    assert tables == 1


def test_prefixes_are_never_the_same(topic_prefix: str) -> None:
    from tests.services import fresh_topic_prefix

    assert topic_prefix != fresh_topic_prefix()
