"""Judges what the agent printed."""


def exact(task, result) -> float:
    return float(result.stdout == task.columns["answer"])
