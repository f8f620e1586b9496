"""Families of metrics in the few forms in which the product shows them.

Rule: a value is given under the tuple of its label values; () for one without labels. Times are shown in seconds, sizes
in records or bytes, as Prometheus asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from onepen.streams.counters import Histogram

__all__ = ["Values", "counter", "gauge", "histogram"]

Values = Mapping[Any, float]


def gauge(name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label, value in values.items():
        family.add_metric(label, value)
    return family


def counter(name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for label, value in values.items():
        family.add_metric(label, value)
    return family


def histogram(name: str, text: str, observed: Histogram, divisor: float = 1.0) -> Metric:
    family = HistogramMetricFamily(name, text)
    buckets = [(_bound(bound / divisor), float(count)) for bound, count in observed.cumulative()]
    family.add_metric((), buckets, observed.total / divisor)
    return family


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))
