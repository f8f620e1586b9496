"""Writers that take decoded batches and know no Kafka."""
