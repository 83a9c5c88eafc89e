"""The environment of a run that has none: one prompt, one completion, judged by the scorers."""

from millrace.core.records import Task
from millrace.episodes.agent import Agent


async def answer(task: Task, agent: Agent) -> None:
    if isinstance(task.prompt, str):
        await agent.complete(task.prompt)
    else:
        await agent.chat(task.prompt)
