"""Hand-made scored groups, and user-defined shaping parts."""

from dataclasses import dataclass, replace

from fakes import make_rollout

from millrace.core.records import Episode, Group, Score, Task, Turn


def scored(*totals: float, lengths=None, finishes=None, number=0, **parts) -> Group:
    """One episode per total; `parts` are columns of score parts."""
    lengths = lengths or [4] * len(totals)
    finishes = finishes or ["stop"] * len(totals)
    episodes = tuple(
        Episode(
            turns=(Turn(prompt="p", completion="c", finish=finish),),
            rollouts=(make_rollout(sampled_tokens=length, seed=index, kept=True),),
        )
        for index, (length, finish) in enumerate(zip(lengths, finishes, strict=True))
    )
    scores = tuple(
        Score(total=total, parts={name: column[index] for name, column in parts.items()})
        for index, total in enumerate(totals)
    )
    return Group(number=number, task=Task(prompt="p"), episodes=episodes, scores=scores)


def totals_of(group: Group) -> list[float]:
    return [score.total for score in group.scores]


def every_second(group, *, keep, rng, first=0):
    return range(first, len(group.episodes), 2)


def as_many_as_sqrt(num_tokens):
    return -(num_tokens**0.5)


def broken(*args, **settings):
    raise KeyError("x")


@dataclass(frozen=True, kw_only=True)
class OnlyNumber:
    number: int

    def __call__(self, group: Group) -> Group | None:
        return group if group.number == self.number else None


def without_episodes(group):
    return replace(group, episodes=())


def true(group):
    return True
