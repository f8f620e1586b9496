"""The PostgreSQL sink: writer, migrations, queries and readers. It takes decoded records and knows no Kafka."""
