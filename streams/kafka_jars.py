"""The jars of Apache Kafka: fetched once, checked against the checked-in lock each time.

Rule: nothing runs whose SHA-256 is not in `kafka-jars.lock.json`. jgo's Maven layer fetches the jars (it
reads the repositories of the machine's jgo settings); its environment layer is not used, because that one
downloads a JDK of its own. A download goes to a directory of this process first and moves into the cache
after its check, so an interrupted or parallel run never leaves half a jar behind.

`python -m onepen.streams.kafka_jars` resolves the roots of the lock again and writes the lock anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jgo.maven import MavenContext

__all__ = ["JarsUnavailable", "LockedJar", "cache_dir", "kafka_version", "locked_jars", "provide_jars"]

LOCK_PATH = Path(__file__).with_name("kafka-jars.lock.json")
DOWNLOADS_AT_ONCE = 8
ATTEMPTS_PER_JAR = 3
HTTP_TIMEOUT_S = 30
PROGRESS_STEP_BYTES = 8 * 1024 * 1024

Progress = Callable[[str], None]


class JarsUnavailable(RuntimeError):
    """Kafka's jars could not be provided; the message says why and what helps."""


@dataclass(frozen=True, slots=True)
class LockedJar:
    """One jar of the lock."""

    group: str
    artifact: str
    version: str
    sha256: str
    size_bytes: int

    @property
    def file_name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"

    @property
    def coordinate(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"


def cache_dir() -> Path:
    """Where onepen keeps what it can fetch again: `ONEPEN_CACHE_DIR`, else the user's cache directory."""
    if explicit := os.environ.get("ONEPEN_CACHE_DIR"):
        return Path(explicit).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "onepen"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "onepen"
    return Path.home() / ".cache" / "onepen"


def locked_jars(lock_path: Path = LOCK_PATH) -> tuple[LockedJar, ...]:
    """The jars of the lock, in the order of the class path."""
    lock: dict[str, Any] = json.loads(lock_path.read_text("utf-8"))
    return tuple(LockedJar(**jar) for jar in lock["jars"])


def kafka_version(jars: tuple[LockedJar, ...]) -> str:
    """The version of the broker itself."""
    return next(jar.version for jar in jars if jar.group == "org.apache.kafka" and "kafka_" in jar.artifact)


def provide_jars(progress: Progress, *, cache: Path | None = None) -> list[Path]:
    """Return the paths of all locked jars, each checked; fetch those that are missing or damaged.

    Raises `JarsUnavailable` with a sentence for the person at the terminal.
    """
    jars = locked_jars()
    directory = (cache or cache_dir()) / f"kafka-{kafka_version(jars)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        missing = [jar for jar in jars if not _matches(directory / jar.file_name, jar)]
        if missing:
            _fetch(missing, directory, progress)
    except OSError as error:
        if _is_network(error):
            raise JarsUnavailable(_offline_sentence(directory, error)) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise JarsUnavailable(
                f"The disk of {directory} is full. Kafka's jars take {_mb(jars)} MB; free some space, or set "
                "ONEPEN_CACHE_DIR to a directory elsewhere."
            ) from error
        raise JarsUnavailable(f"Kafka's jars could not be stored in {directory}: {error}") from error
    return [directory / jar.file_name for jar in jars]


def _mb(jars: list[LockedJar] | tuple[LockedJar, ...]) -> int:
    return max(1, round(sum(jar.size_bytes for jar in jars) / 1_000_000))


def _matches(path: Path, jar: LockedJar) -> bool:
    try:
        if path.stat().st_size != jar.size_bytes:
            return False
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == jar.sha256
    except FileNotFoundError:
        return False


def _fetch(missing: list[LockedJar], directory: Path, progress: Progress) -> None:
    total_mb = _mb(missing)
    progress(f"Fetching Apache Kafka {kafka_version(locked_jars())} once: {len(missing)} jars, {total_mb} MB")
    done_bytes = 0
    told_bytes = 0
    lock = threading.Lock()

    def took(size_bytes: int) -> None:
        nonlocal done_bytes, told_bytes
        with lock:
            done_bytes += size_bytes
            if done_bytes - told_bytes >= PROGRESS_STEP_BYTES:
                told_bytes = done_bytes
                progress(f"Fetching Apache Kafka: {round(done_bytes / 1_000_000)} of {total_mb} MB")

    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=directory) as work:
        context = _maven(Path(work))

        def one(jar: LockedJar) -> None:
            _fetch_one(jar, context, directory)
            took(jar.size_bytes)

        with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
            futures = [pool.submit(one, jar) for jar in sorted(missing, key=lambda j: -j.size_bytes)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    progress(f"Apache Kafka is complete, every checksum matches ({directory})")


def _maven(work: Path) -> MavenContext:
    """jgo's Maven layer with the machine's repositories and a repository cache of this run only."""
    try:
        from jgo.config import GlobalSettings
        from jgo.constants import MAVEN_CENTRAL_URL
        from jgo.maven import MavenContext
    except ImportError as error:
        raise JarsUnavailable(
            'The embedded broker needs jgo: install it with  pip install "onepen[embedded]"'
        ) from error
    settings = GlobalSettings.load()
    remote = {"central": MAVEN_CENTRAL_URL, **settings.repositories}
    return MavenContext(repo_cache=work, remote_repos=remote, timeout=HTTP_TIMEOUT_S)


def _fetch_one(jar: LockedJar, context: MavenContext, directory: Path) -> None:
    target = directory / jar.file_name
    if _copy_from_local_repository(jar, target):
        return
    artifact = context.project(jar.group, jar.artifact).at_version(jar.version).artifact()
    problem = "not found in any repository"
    for attempt in range(1, ATTEMPTS_PER_JAR + 1):
        try:
            path = artifact.resolve()
        except RuntimeError as error:  # jgo's word for "no repository has it"
            problem = str(error)
            continue
        except OSError as error:
            _forget_half(artifact.cached_path)
            if attempt == ATTEMPTS_PER_JAR or not _is_network(error):
                raise
            continue
        if _matches(path, jar):
            os.replace(path, target)
            return
        problem = "its SHA-256 is not the one of the lock"
        path.unlink()
    raise JarsUnavailable(f"{jar.coordinate}: {problem} (tried {ATTEMPTS_PER_JAR} times). Nothing was started.")


def _forget_half(path: Path | None) -> None:
    # jgo takes any file that is there for complete, also one that a broken connection cut short.
    if path is not None:
        path.unlink(missing_ok=True)


def _copy_from_local_repository(jar: LockedJar, target: Path) -> bool:
    """Take the jar from the user's Maven repository when the very same one is there."""
    from jgo.constants import default_maven_repo

    path = Path(default_maven_repo(), *jar.group.split("."), jar.artifact, jar.version, jar.file_name)
    if not _matches(path, jar):
        return False
    handle, temporary = tempfile.mkstemp(prefix=".copy-", dir=target.parent)
    os.close(handle)
    shutil.copyfile(path, temporary)
    os.replace(temporary, target)
    return True


def _is_network(error: OSError) -> bool:
    # requests' exceptions are OSErrors without errno; file errors have one.
    return type(error).__module__.split(".")[0] in ("requests", "urllib3") or isinstance(
        error, ConnectionError | TimeoutError
    )


def _offline_sentence(directory: Path, error: OSError) -> str:
    return (
        "Apache Kafka is not in the cache yet and the Maven repository cannot be reached "
        f"({type(error).__name__}). Connect this machine once, name a reachable repository in jgo's settings "
        f"file, or copy {directory} from a machine that has it."
    )


def _relock(lock_path: Path = LOCK_PATH) -> None:
    """Resolve the roots of the lock with all that they need and write the lock anew."""
    roots: list[str] = json.loads(lock_path.read_text("utf-8"))["roots"]
    jars: list[LockedJar] = []
    with tempfile.TemporaryDirectory() as work:
        context = _maven(Path(work))
        inputs, transitive = context.resolver.resolve([context.create_dependency(root) for root in roots])
        needed = [*inputs, *(d for d in transitive if d.scope in ("compile", "runtime"))]
        for dependency in needed:
            artifact = dependency.artifact
            content = artifact.resolve().read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            jars.append(LockedJar(artifact.groupId, artifact.artifactId, artifact.version, digest, len(content)))
    jars.sort(key=lambda jar: jar.coordinate)
    lock = {"roots": roots, "jars": [asdict(jar) for jar in jars]}
    lock_path.write_text(json.dumps(lock, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    _relock()
