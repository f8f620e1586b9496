"""Counts the inputs of each session with Faust: a table with its changelog, one event for each input.

Arguments: bootstrap servers, application id, inputs topic, events topic, a folder of its own, processing guarantee.
"""

from __future__ import annotations

import sys
from typing import Any

import faust


def main() -> None:
    bootstrap, name, inputs_name, events_name, folder, guarantee = sys.argv[1:7]
    sys.argv[1:] = ["worker"]
    app = faust.App(
        name,
        broker=f"kafka://{bootstrap}",
        store="memory://",
        datadir=folder,
        processing_guarantee=guarantee,
        value_serializer="json",
        topic_partitions=4,
        topic_disable_leader=True,
        consumer_auto_offset_reset="earliest",
        web_enabled=False,
    )
    inputs = app.topic(inputs_name, key_type=bytes, value_serializer="json")
    events = app.topic(events_name, key_type=bytes, value_serializer="json")
    counts = app.Table("counts", default=int, partitions=4)

    @app.agent(inputs)
    async def count(stream: Any) -> None:
        async for command in stream:
            session = command["session"]
            counts[session] += 1
            event = {"session": session, "count": counts[session], "number": command["number"]}
            await events.send(key=session.encode(), value=event)

    app.main()


if __name__ == "__main__":
    main()
