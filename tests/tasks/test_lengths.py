import numpy as np

from millrace.core.records import Episode, Group, Rollout, Sampling, Task
from millrace.tasks.streams import LengthPredictor


def group_of(prompt: str, *lengths: int) -> Group:
    def rollout(length: int) -> Rollout:
        return Rollout(
            tokens=np.zeros(length, np.int32),
            mask=np.ones(length, bool),
            engine_logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
            sampling=Sampling(),
        )

    episodes = tuple(Episode(turns=(), rollouts=(rollout(length),)) for length in lengths)
    return Group(number=0, task=Task(prompt=prompt), episodes=episodes)


def test_longer_tasks_get_higher_priority():
    lengths = LengthPredictor(max_skips=8)
    assert lengths.priority(Task(prompt="long")) == 0  # nothing is known of any
    lengths.learn(group_of("short", 2, 4))
    lengths.learn(group_of("long", 30, 50))
    assert [lengths.priority(Task(prompt=p)) for p in ("short", "long", "new")] == [0, 4, 4]
    for number in range(6):
        lengths.learn(group_of(f"middle {number}", 10 + number))
    assert lengths.priority(Task(prompt="long")) == 7
    lengths.learn(group_of("long", 1, 1))  # it has become short: 20.5 on average of both times
    lengths.learn(group_of("long", 1, 1))
    lengths.learn(group_of("long", 1, 1))
    assert lengths.priority(Task(prompt="long")) == 1


def test_priority_is_zero_if_disabled():
    lengths = LengthPredictor(max_skips=0)
    lengths.learn(group_of("long", 30))
    assert lengths.priority(Task(prompt="long")) == 0
