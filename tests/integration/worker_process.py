"""A worker process for the tests: `python -m tests.integration.worker_process DIR`, addresses by environment.

Its body writes what it did into files of DIR and waits for files of DIR, so that a test can hold it anywhere.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from onepen.streams.worker import ActionPermit, InDoubt, RunContext, Worker, cancellation


def make(folder: Path) -> Worker:
    worker = Worker("process", max_runs=2, grace_ms=300)

    def wait_for(name: str) -> str:
        while not (folder / name).exists():
            if cancellation().wait_in_thread(0.02):
                return "stopped"
        return "seen"

    def hold(name: str) -> str:
        """Waits without looking at the cancellation, as a frozen or careless tool does."""
        while not (folder / name).exists():
            time.sleep(0.02)
        return "seen"

    def perform(args: Any, permit: ActionPermit) -> str:
        (folder / f"performed-{permit.generation}").write_text(permit.key)
        return hold("finish") if args.get("hold") else "done"

    @worker.run
    async def body(ctx: RunContext) -> Any:
        (folder / f"began-{ctx.generation}").write_text(str(os.getpid()))
        match ctx.input:
            case "wait":
                return await ctx.tool("wait_for", wait_for, name="go")
            case "hold":
                return await ctx.tool("hold", hold, name="go")
            case "act":
                try:
                    return await ctx.action("send", {"hold": True}, perform=perform)
                except InDoubt:
                    (folder / "in-doubt").write_text("")
                    return await ctx.action(
                        "send", {"hold": True}, perform=perform, key=f"{ctx.run_id}:send:1",
                        resolution="reconciled_not_performed",
                    )  # fmt: skip

    return worker


if __name__ == "__main__":
    make(Path(sys.argv[1])).serve()
