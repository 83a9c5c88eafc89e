"""Reward functions. run.toml names the ones that count, as "rewards.py:NAME"."""


def exact_match(completions, answer, **columns):
    """1 for exactly the right answer, otherwise 0.

    Called with a whole group of completions at once. Each column of tasks.jsonl is a list beside
    them, under its own name: here `answer`; ask for `prompts` or `completion_ids` in the same way.
    Return one number per completion, or None where this reward has nothing to say.

    It runs in its own process, so it may take its time; "async def" works too. If it raises, the
    group is dropped, counted and shown, and the run goes on.
    """
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
