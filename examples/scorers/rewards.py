"""The reward function of function.toml."""


def outcome(completions: list[str], answer: list[str], **columns) -> list[float]:
    """1 if the last sum is correct, otherwise 0; the steps do not count."""
    last = [text.removesuffix(";")[-1:] for text in completions]
    return [float(found == correct) for found, correct in zip(last, answer, strict=True)]
