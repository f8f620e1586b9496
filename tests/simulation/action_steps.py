"""What a simulated body does next about an action that it asked for: the same in a city and in a whole world."""

from __future__ import annotations

from typing import Literal

ASKS_MAX = 4

Step = Literal["wait", "ask", "begin", "resolve", "go on"]


def step_of(fate: str | None, state: str | None, asked: int) -> Step:
    """`fate` of the request, `state` of the action in the view, how often it was asked for so far. `resolve`: it is in
    doubt, and whoever knows what the target did may settle that; otherwise the body goes on."""
    if fate is None:
        return "wait"
    if fate == "accepted":
        steps: dict[str | None, Step] = {"waiting": "wait", "approved": "ask", "permitted": "begin"}
        return steps.get(state, "go on")
    if asked < ASKS_MAX and fate == "in_doubt":
        return "resolve"
    return "ask" if asked < ASKS_MAX and fate == "lease_expired" else "go on"
