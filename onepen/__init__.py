"""The front door: the public names, loaded when first used.

Rule: importing this package costs nothing but itself. A producer pays for Kafka and Avro only; Faust,
asyncpg and Typer are loaded by those who use them. Everything not named in `__all__` is internal.
"""

from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onepen.streams.async_client import AsyncClient
    from onepen.streams.client import Client
    from onepen.streams.subscriber import Subscriber
    from onepen.streams.worker import RunContext, Worker

__version__ = "0.1.0"

__all__ = ["AsyncClient", "Client", "RunContext", "Subscriber", "Worker", "__version__"]

_HOME = {
    "AsyncClient": "onepen.streams.async_client",
    "Client": "onepen.streams.client",
    "RunContext": "onepen.streams.worker",
    "Subscriber": "onepen.streams.subscriber",
    "Worker": "onepen.streams.worker",
}
_FOLDERS = ("schemas", "processors", "streams", "sinks")


def _require_folders() -> None:
    """Refuse a copy whose links were lost, in one sentence instead of a puzzling ModuleNotFoundError."""
    for folder in _FOLDERS:
        spec = PathFinder.find_spec(f"{__name__}.{folder}", __path__)
        if spec is None or spec.origin is None:
            raise ImportError(
                f"onepen/{folder} is not a package: this copy of the repository lost its symbolic links "
                "(a zip download, or a checkout on Windows without core.symlinks), so clone it with git "
                "on Linux or macOS, or install the package with pip."
            )


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_require_folders()
