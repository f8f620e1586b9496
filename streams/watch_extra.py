"""Metrics need a package that comes with an extra; who asks for them without it is told so before anything starts."""

from __future__ import annotations

from importlib.util import find_spec

from onepen.schemas.errors import Invalid

__all__ = ["require_extra"]


def require_extra() -> None:
    """Raise `Invalid` when the package is missing."""
    if find_spec("prometheus_client") is None:
        raise Invalid("metrics_port: metrics need an extra: pip install 'onepen[prometheus]'", field="metrics_port")
