"""Environments that the tests run in worker processes."""

import os
import sys
from pathlib import Path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def append(task, text: str) -> None:
    with Path(task.columns["file"]).open("a") as file:
        file.write(text)


async def lookup(key: str) -> str:
    """The value of a key."""
    return {"a": "12"}[key]


async def with_a_tool(task, agent):
    messages = [user(f"What is {task.prompt}? {agent.rng.integers(1000)}")]
    reply = await agent.chat(messages, tools=[lookup])
    messages += [reply, *await agent.call_tools(reply)]
    reply = await agent.chat(messages, tools=[lookup])
    return float(reply.text == task.columns["value"])


async def three_turns(task, agent):
    """Write the own process to the task's file before each turn."""
    messages = [user(f"{task.prompt} {agent.rng.integers(1000)}")]
    for _ in range(3):
        append(task, f"{os.getpid()}\n")
        reply = await agent.chat(messages)
        messages += [reply, user(f"{reply.text}?")]
    return float(len(messages))


async def misbehaving(task, agent):
    reply = await agent.chat([user(task.prompt)])
    match task.prompt:
        case "raise":
            raise ValueError("no such move")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(3)
        case "object":
            await agent.chat([{**user("again"), "board": object()}])
        case "surrogate":  # half of a character, which no encoding of a message holds
            await agent.chat([{**user("again"), "board": "\ud800"}])
        case "wait":
            try:
                await agent.chat([user("again")])
            finally:
                append(task, "ended")
    return float(len(reply.text))
