"""A worker process of the founding story: `python -m onepen.demo.story_worker`, addresses by environment.

Its agent is a script in the prompt, so that the story decides what a run does and the worker only does it:
`["model", ms]`, `["tool", name, ms]`, `["steer"]` (wait for one), `["mail", to]`, `["say", text]`, `["together", …]`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Final

from onepen.demo import mail_server
from onepen.streams.worker import ActionPermit, RunContext, Worker, cancellation

__all__ = ["MAIL_VARIABLE", "NONCE_VARIABLE", "READY_VARIABLE", "SEND_MAIL", "TENANT_VARIABLE", "make_worker"]

MAIL_VARIABLE: Final = "ONEPEN_STORY_MAIL"
TENANT_VARIABLE: Final = "ONEPEN_TENANT_ID"
NONCE_VARIABLE: Final = "ONEPEN_STORY_NONCE"
READY_VARIABLE: Final = "ONEPEN_STORY_READY"
SEND_MAIL: Final = "send_mail"
READY_TIMEOUT_MS: Final = 30_000
NAP_S: Final = 0.05


def make_worker(mail_address: str, tenant_id: int, nonce: str) -> Worker:
    """The worker with its one body. Addresses of the log come from the environment."""
    worker = Worker("story", tenant_id=tenant_id, max_runs=4)

    @worker.run
    async def play(ctx: RunContext) -> Any:
        if not ctx.session_id.endswith(nonce):
            raise RuntimeError("left over from a story that broke off")
        task: dict[str, Any] = ctx.input
        # Which input starts which run is decided by the log, so each prompt of a session has the scripts of all runs.
        scripts: list[list[Any]] = task["scripts"]
        for step in scripts[min(ctx.run_no, len(scripts)) - 1]:
            await perform(ctx, step, mail_address)
        return {"text": f"done: {task['text']}"}

    return worker


async def perform(ctx: RunContext, step: list[Any], mail_address: str) -> None:
    """One step of a script."""
    match step:
        case ["model", int(ms)]:
            async with ctx.model_request(model="scripted"):
                await asyncio.sleep(ms / 1000)
        case ["say", str(text)]:
            await ctx.message(text)
        case ["tool", str(name), int(ms)]:
            await ctx.tool(name, look_up, ms=ms)
        case ["steer"]:
            await one_steer(ctx)
        case ["together", *steps]:
            await asyncio.gather(*(perform(ctx, one, mail_address) for one in steps))
        case ["mail", str(to)]:
            session = ctx.session_id

            def send_mail(args: dict[str, Any], permit: ActionPermit) -> dict[str, Any]:
                return send_twice(mail_address, session, args, permit)

            await ctx.action(SEND_MAIL, {"to": to}, perform=send_mail, honours_keys=True)
        case _:
            raise ValueError(f"no such step: {step!r}")


async def one_steer(ctx: RunContext) -> None:
    """Wait until somebody steers. Asking is local; the view tells of steers as they come."""
    while True:
        if await ctx.steers():
            return
        await asyncio.sleep(NAP_S)


def look_up(ms: int) -> dict[str, int]:
    """A tool that takes a while, in a thread; a cancel ends it early."""
    cancellation().wait_in_thread(ms / 1000)
    return {"rows": 3}


def send_twice(address: str, session_id: str, args: dict[str, Any], permit: ActionPermit) -> dict[str, Any]:
    """Send a mail, and once more as if the first answer had been lost: the target honours the key."""
    call = {
        "sessionId": session_id,
        "runId": permit.run_id,
        "generation": permit.generation,
        "name": permit.name,
        "actionKey": permit.key,
        "argsDigest": permit.args_digest,
        **args,
    }
    first = mail_server.send(address, call)
    again = mail_server.send(address, call)
    return {"mail": first["mail"], "sameMailOnRepeat": again["mail"] == first["mail"]}


def main() -> None:
    """Serve until SIGTERM."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    worker = make_worker(os.environ[MAIL_VARIABLE], int(os.environ[TENANT_VARIABLE]), os.environ[NONCE_VARIABLE])
    if ready := os.environ.get(READY_VARIABLE):
        threading.Thread(target=_tell_ready, args=(worker, Path(ready)), daemon=True).start()
    worker.serve(stop)


def _tell_ready(worker: Worker, path: Path) -> None:
    if worker.wait_ready(READY_TIMEOUT_MS):
        path.touch()


if __name__ == "__main__":
    main()
