"""Reward of an episode: 1 if the agent printed the answer."""


def exact(task, result) -> float:
    return float(result.stdout == task.columns["answer"])
