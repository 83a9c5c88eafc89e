"""Real Gymnasium environments with a scripted model."""

import itertools
import string
import threading

import pytest
from chat_engine import ChatEngine, player_of

from millrace.core.errors import ConfigError, TaskError
from millrace.core.records import Task
from millrace.environments.adapters import GymEnvironment
from millrace.environments.replay.schema import EpisodeLimits
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.environments.threads import LoopThread

gymnasium = pytest.importorskip("gymnasium")


class Guess(gymnasium.Env):
    """Guess the letter of the seed; each wrong guess earns -1."""

    action_space = gymnasium.spaces.Text(1, charset="abc")
    observation_space = gymnasium.spaces.Text(20, charset=string.printable)

    def __init__(self) -> None:
        self.threads = {threading.current_thread()}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.threads.add(threading.current_thread())
        self.right = "abc"[int(self.np_random.integers(3))]
        return "Guess a letter.", {}

    def step(self, action):
        self.threads.add(threading.current_thread())
        is_right = action == self.right
        return "No.", 1.0 if is_right else -1.0, is_right, False, {}


gymnasium.register("MillraceGuess-v0", entry_point=Guess)


@pytest.fixture
def play():
    with LoopThread("environments") as thread:

        async def play(environment, answer, task, *, group_size=1, **rules):
            engine = ChatEngine(answer)
            player = player_of(environment, engine, thread=thread, **rules)
            group = await player.play_for_training(task, attempt=Attempt(0), group_size=group_size)
            return group.episodes, engine

        yield play


def letter_of(seed: int) -> str:
    env = gymnasium.make("MillraceGuess-v0")
    env.reset(seed=seed)
    return env.unwrapped.right


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_text_environment_is_reset_with_the_task_seed(play, seed):
    guesses = itertools.cycle("abc")
    task = Task(prompt="Which letter?", columns={"seed": seed})
    (episode,), engine = await play(
        GymEnvironment("MillraceGuess-v0"), lambda _: f" {next(guesses)}\n", task
    )
    num_wrong = "abc".index(letter_of(seed))
    assert episode.reward == 1.0 - num_wrong
    assert episode.ending == "done"
    assert [turn.completion.strip() for turn in episode.turns] == [*"abc"][: num_wrong + 1]
    assert "Which letter?\n\nGuess a letter." in engine.prompts[0]
    assert all("No." in prompt for prompt in engine.prompts[1:])
    assert len(episode.rollouts) == 1  # all turns of it


async def test_environments_are_reused_in_their_own_thread(play):
    made: list[Guess] = []

    def make() -> Guess:
        made.append(Guess())
        return made[-1]

    environment = GymEnvironment(make)
    task = Task(prompt="?", columns={"seed": 0})
    await play(environment, lambda _: letter_of(0), task, group_size=3)
    await play(environment, lambda _: letter_of(0), task, group_size=3)
    assert 1 <= len(made) <= 3
    assert all(len(env.threads) == 1 for env in made)


async def test_invalid_action_is_reported_and_uses_a_turn(play):
    right = letter_of(5)
    said = iter(["zebra", right])
    environment = GymEnvironment("MillraceGuess-v0", invalid_reward=-0.5)
    (episode,), engine = await play(
        environment, lambda _: next(said), Task(prompt="?", columns={"seed": 5})
    )
    assert "That is no action: 'zebra' is not in Text(" in engine.prompts[1]
    assert episode.reward == 0.5


async def test_episode_at_the_turn_limit_keeps_its_rewards(play):
    wrong = next(letter for letter in "abc" if letter != letter_of(5))
    (episode,), _engine = await play(
        GymEnvironment("MillraceGuess-v0", total=min),
        lambda _: wrong,
        Task(prompt="?", columns={"seed": 5}),
        limits=EpisodeLimits(max_turns=3),
    )
    assert (episode.reward, episode.ending, len(episode.turns)) == (-1.0, "turns", 3)


def field(position: int) -> str:
    return f"You are on field {position}."


async def test_frozen_lake_is_played_with_a_render_function(play):
    moves = iter(["2, no: 2", "2", "I go down: 1", "1", "1", "right is 2"])
    environment = GymEnvironment("FrozenLake-v1", render=field, is_slippery=False)
    (episode,), engine = await play(
        environment, lambda _: next(moves), Task(prompt="Reach field 15.", columns={"seed": 0})
    )
    assert episode.reward == 1.0
    fields = [prompt.rpartition("You are on field ")[2] for prompt in engine.prompts]
    assert [int(text.partition(".")[0]) for text in fields] == [0, 1, 2, 6, 10, 14]


async def test_blackjack_ends_when_the_player_sticks(play):
    environment = GymEnvironment("Blackjack-v1", render=lambda seen: f"You hold {seen[0]}.")
    (episode,), _engine = await play(
        environment, lambda _: "0", Task(prompt="0 = stick", columns={"seed": 3})
    )
    assert episode.reward in (-1.0, 0.0, 1.0, 1.5)
    assert len(episode.turns) == 1


async def test_observations_that_are_not_text_need_render(play):
    with pytest.raises(TaskError, match=r"'FrozenLake-v1' has the observation 0 of type int"):
        await play(GymEnvironment("FrozenLake-v1"), lambda _: "0", Task(prompt="?"))


def test_unknown_gymnasium_id_raises_config_error():
    with pytest.raises(ConfigError, match="'NoSuchLake-v1' is not known to gymnasium"):
        GymEnvironment("NoSuchLake-v1")
