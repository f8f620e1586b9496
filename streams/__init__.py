"""The shell on Kafka: log, engine loop, state, client, subscriber, worker, feed, views and the embedded stack."""
