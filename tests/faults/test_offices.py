"""Where Kafka keeps a group or a transactional id: the absolute value of Java's hash, by which offices are found."""

import pytest

from tests.faults.three_brokers import kept_in


@pytest.mark.parametrize(
    ("name", "partitions", "partition"),
    [
        ("", 4, 0),
        ("a", 50, 97 % 50),
        ("t699be6afb0.processor", 4, 315_355_592 % 4),
        # A negative hash: with its sign bit cleared it would be partition 3.
        ("t875ccaf116.processor", 4, 429_625_741 % 4),
        # `Integer.MIN_VALUE` has no absolute value.
        ("polygenelubricants", 7, 0),
    ],
)
def test_kept_in(name: str, partitions: int, partition: int) -> None:
    assert kept_in(name, partitions) == partition
