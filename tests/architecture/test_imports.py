"""Who may import whom, under which names, and what importing costs."""

import json
import subprocess
import sys
from pathlib import Path

import onepen
from tests.architecture.source_tree import FOLDERS, ROOT

LAZY = ("asyncpg", "confluent_kafka", "faust", "fastavro", "pydantic", "typer")


def python(code: str, *, cwd: Path = ROOT, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter; with `path`, from there alone instead of the installed package."""
    isolated = ["-I", "-S"] if path is not None else []
    code = f"import sys; sys.path.insert(0, {str(path)!r})\n{code}" if path is not None else code
    return subprocess.run(
        [sys.executable, *isolated, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def loaded_after(code: str) -> set[str]:
    """The modules in `sys.modules` after `code` ran in a fresh interpreter."""
    done = python(f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_contracts_hold() -> None:
    """The contracts of pyproject.toml, as `make lint` runs them."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


def test_the_links_are_relative() -> None:
    for folder in FOLDERS:
        link = ROOT / "onepen" / folder
        assert link.is_symlink()
        assert link.readlink() == Path("..") / folder


def test_no_module_is_loaded_under_a_bare_name() -> None:
    loaded = loaded_after(
        "import importlib, pkgutil, onepen\n"
        "for module in pkgutil.walk_packages(onepen.__path__, 'onepen.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)\n"
    )
    assert {f"onepen.{folder}" for folder in FOLDERS} <= loaded
    bare = {name for name in loaded if name.split(".")[0] in FOLDERS}
    assert not bare


def test_importing_the_front_door_loads_no_driver() -> None:
    loaded = loaded_after("import onepen")
    assert not loaded.intersection(LAZY)


def test_a_producer_pays_for_kafka_and_avro_only() -> None:
    loaded = loaded_after("from onepen import AsyncClient, Client, Subscriber")
    assert {"confluent_kafka", "fastavro"} <= loaded
    assert not loaded.intersection({"aiokafka", "asyncpg", "faust", "rich", "typer"})


def test_the_public_names_are_there() -> None:
    for name in onepen.__all__:
        assert getattr(onepen, name) is getattr(onepen, name)
        assert name in dir(onepen)
    assert not hasattr(onepen, "no_such_name")


def test_a_copy_without_links_says_so_in_one_sentence(tmp_path: Path) -> None:
    copy = tmp_path / "onepen"
    copy.mkdir()
    (copy / "__init__.py").write_text((ROOT / "onepen" / "__init__.py").read_text("utf-8"))
    for folder in FOLDERS:  # what git writes where it may not make links
        (copy / folder).write_text(f"../{folder}")
    broken = python("import onepen", path=tmp_path, cwd=tmp_path)
    assert broken.returncode == 1
    last = broken.stderr.splitlines()[-1]
    assert last.startswith("ImportError: onepen/schemas is not a package: this copy of the repository lost")

    for folder in FOLDERS:  # the same copy with whole folders is fine, so the links were the reason
        (copy / folder).unlink()
        (copy / folder).mkdir()
        (copy / folder / "__init__.py").touch()
    assert python("import onepen", path=tmp_path, cwd=tmp_path).returncode == 0
