"""Reward functions. run.toml names those to use, as "rewards.py:NAME"."""


def exact_match(completions, answer, **columns):
    """1 for exactly the right answer, otherwise 0.

    A call gets all completions of a group. Each column of tasks.jsonl is a list argument of the
    same length: here `answer`; `prompts` and `completion_ids` are available in the same way. Return
    one number per completion, or None for a completion that this reward does not apply to.

    The function runs in its own process, so it may be slow; "async def" works too. If it raises,
    its group is dropped and counted, and the run continues.
    """
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
