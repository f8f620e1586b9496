"""The one partition function: murmur2 of the raw key, as the Java client computes it.

`murmur2_random` in librdkafka, aiokafka, Faust and Java agree on it; librdkafka's default does not.
"""

from __future__ import annotations

from functools import lru_cache

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """32-bit unsigned murmur2 with Kafka's seed."""
    length = len(data)
    h = (_SEED ^ length) & _MASK
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little")
        k = (k * _M) & _MASK
        k ^= k >> 24
        k = (k * _M) & _MASK
        h = ((h * _M) & _MASK) ^ k
    tail = data[whole:]
    if tail:
        h ^= int.from_bytes(tail, "little")
        h = (h * _M) & _MASK
    h ^= h >> 13
    h = (h * _M) & _MASK
    return h ^ (h >> 15)


@lru_cache(maxsize=65_536)
def partition_of(key: bytes, partitions: int) -> int:
    """Partition of a raw session id (or any raw key) among `partitions`."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
