"""Sums to play and a reward for digits: what whole runs in tests train on."""

TASKS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]


def share_of_digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
