"""What a run that learns from a function is scored by."""


def outcome(completions: list[str], answer: list[str], **columns) -> list[float]:
    """1 if the last sum is right, however it came about."""
    ends = [text.removesuffix(";")[-1:] for text in completions]
    return [float(end == right) for end, right in zip(ends, answer, strict=True)]
