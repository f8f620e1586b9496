"""What is shipped: the lock file, the version, and wheel and sdist with every file of the four folders."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import onepen
from tests.architecture.source_tree import FOLDERS, ROOT


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", str(out), "."],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def source_files() -> set[str]:
    """Every file that belongs into the package, by its name there."""
    real = {file for file in (ROOT / "onepen").rglob("*") if file.is_file()}
    linked = {file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()}
    names = {file.relative_to(ROOT / "onepen") for file in real if file.is_relative_to(file.resolve())}
    names |= {file.relative_to(ROOT) for file in linked}
    return {f"onepen/{name.as_posix()}" for name in names if "__pycache__" not in name.parts}


def test_the_wheel_has_every_file_as_an_ordinary_file(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {entry.filename: entry for entry in archive.infolist()}
    assert not source_files() - names.keys()
    assert {name.split("/")[0] for name in names} == {"onepen", f"onepen-{onepen.__version__}.dist-info"}
    assert not [name for name, entry in names.items() if (entry.external_attr >> 28) == 0xA], "links"
    assert {Path(name).suffix for name in names} >= {".avsc", ".json", ".sql"}


def test_the_sdist_has_every_file_once(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() for member in members)
    names = {member.name.split("/", 1)[1] for member in members}
    assert not source_files() - names
    assert {name.split("/")[0] for name in names} <= {
        "onepen", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"
    }  # fmt: skip


def test_one_version_everywhere(project: dict[str, dict[str, str]]) -> None:
    assert project["project"]["version"] == onepen.__version__
    assert f"## {onepen.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def requirement_name(line: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", line)
    assert match is not None, line
    return re.sub(r"[._-]+", "-", match[0]).lower()


def test_the_lock_is_complete_hashed_and_names_no_place(project: dict[str, dict[str, object]]) -> None:
    text = (ROOT / "requirements.lock").read_text("utf-8")
    entries = [block for block in re.split(r"\n(?=\S)", text.strip()) if not block.startswith("#")]
    assert not [entry for entry in entries if "--hash=sha256:" not in entry or "==" not in entry]
    assert not re.search(r"://|^--|file:|/work|/home|/tmp", text, flags=re.MULTILINE)

    wanted = list(project["project"]["dependencies"])  # type: ignore[call-overload]
    for extra in project["project"]["optional-dependencies"].values():  # type: ignore[attr-defined]
        wanted += extra
    wanted += project["dependency-groups"]["build"]  # type: ignore[arg-type]
    assert {requirement_name(line) for line in wanted} <= {requirement_name(entry) for entry in entries}
