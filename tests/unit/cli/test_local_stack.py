"""What the stack hands to others: a line for psql with its password file, and the environment of its processes."""

from __future__ import annotations

from pathlib import Path

from onepen.cli.local_stack import psql_command, write_pgpass


def test_psql_gets_what_the_url_means_and_the_password_stands_in_a_file_only(tmp_path: Path) -> None:
    dsn = "postgresql://u%40team:p%3As%23s@[::1]:7,two/d%2Fb"
    path = write_pgpass(tmp_path, dsn)
    assert path.read_text() == "\\:\\:1:7:d/b:u@team:p\\:s#s\ntwo:5432:d/b:u@team:p\\:s#s\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert psql_command(tmp_path, dsn) == f"PGPASSFILE={path} psql -h ::1 -p 7 -U u@team d/b"
