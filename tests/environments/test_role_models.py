"""Roles of other models: their requests, their rendering, and what is trained."""

import pytest
from chat_engine import TOKENIZERS, ChatEngine, player_of, user

from millrace.core.errors import ReplayError, TaskError
from millrace.core.records import Task
from millrace.environments.function_environment import rerun
from millrace.environments.replay.recordings import episode_of
from millrace.environments.replay.schema import Recording, decode
from millrace.environments.rollouts.partial_rollouts import Attempt
from millrace.environments.rollouts.renderer import Renderer, role_model

TASK = Task(prompt="a")
POLICY, JUDGE = TOKENIZERS["chatml"], TOKENIZERS["llama3"]


def lookup(key: str) -> str:
    """The value of a key."""
    return key * 2


def looks_up(prompt: str) -> str:
    """Call the tool in the format of its own family, then repeat the result."""
    if "ipython" not in prompt:
        return '{"name": "lookup", "parameters": {"key": "a"}}'
    return "aa"


async def judged(task, agent):
    answer = await agent.chat([user(task.prompt)])
    judge = agent.role("judge", model="llama")
    messages = await judge.run([user(f"Is {answer.text} right?")], [lookup])
    assert agent.role("judge", model="llama") is judge
    return float(messages[-1]["content"] == "aa")


async def play(function, *, thread, max_context=2000, group_size=2, **rules):
    """Return the group, and the prompts of the policy and the judge."""
    engine, other = ChatEngine(lambda _: "12"), ChatEngine(looks_up, family="llama3")
    llama = role_model(Renderer(JUDGE), path="llama", tool_format="llama3", max_context=max_context)
    player = player_of(function, engine, thread=thread, others={"llama": (llama, other)}, **rules)
    group = await player.play_for_training(TASK, attempt=Attempt(3), group_size=group_size)
    return group, engine, other


async def test_role_of_another_model_uses_its_engines_tokenizer_template_and_tool_format(thread):
    group, engine, other = await play(judged, thread=thread)
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0]
    assert len(engine.requests) == 2
    assert len(other.requests) == 4
    first = next(r for r in other.requests if "ipython" not in JUDGE.decode(r.prompt))
    rendered = JUDGE.decode(first.prompt)
    assert "The value of a key." in rendered
    assert rendered.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert all("<|im_start|>" in prompt for prompt in engine.prompts)
    for request in other.requests:
        assert request.adapter is None
        assert not request.expires


async def test_tokens_of_other_models_are_never_trained(thread):
    group, _engine, _other = await play(judged, thread=thread)
    for episode in group.episodes:
        assert [turn.agent for turn in episode.turns] == ["", "judge", "judge"]
        (rollout,) = episode.rollouts
        assert rollout.agent == ""
        assert POLICY.decode(rollout.tokens).endswith("12<|im_end|>")


@pytest.mark.parametrize(
    ("role", "sentence"),
    [
        ({"model": "gemma"}, r"names the model 'gemma', which is not in .*defined models: llama\."),
        ({"model": "llama", "trained": True}, "the model 'llama', which is never trained"),
        ({"model": "llama", "adapter": "base"}, "adapters belong to the policy's model"),
    ],
)
async def test_invalid_roles_raise_task_error(role, sentence, thread):
    async def asks(task, agent):
        await agent.chat([user("a")])
        agent.role("judge", **role)

    with pytest.raises(TaskError, match=sentence):
        await play(asks, thread=thread)


async def test_role_must_be_requested_with_the_same_model(thread):
    async def changes(task, agent):
        agent.role("judge", model="llama")
        agent.role("judge", trained=False)

    with pytest.raises(TaskError, match="exists with adapter = None, model = 'llama' and"):
        await play(changes, thread=thread)


async def test_role_is_limited_by_the_context_of_its_model(thread):
    async def long(task, agent):
        await agent.role("judge", model="llama").chat([user("a " * 50)])

    with pytest.raises(TaskError, match=r"holds 20; .* raise environment\.models\.llama\.max_cont"):
        await play(long, thread=thread, max_context=20)


async def test_episode_with_another_model_is_recorded_and_replayed(thread):
    group, _engine, _other = await play(judged, thread=thread, group_size=1, records=True)
    (episode,) = group.episodes
    assert episode.recording is not None
    recording = decode(episode.recording, Recording)
    assert recording.models["llama"].tool_format == "llama3"
    assert len(episode_of(recording).rollouts) == 1
    again = await rerun(recording, judged, tokenizer=POLICY, tokenizers={"llama": JUDGE})
    assert again.recording == episode.recording
    with pytest.raises(ReplayError, match=r"other models \(llama\), and their tokenizers are"):
        await rerun(recording, judged, tokenizer=POLICY)


async def test_replay_error_is_decoded_with_the_tokenizer_of_the_other_model(thread):
    async def otherwise(task, agent):
        await agent.chat([user(task.prompt)])
        await agent.role("judge", model="llama").run([user("Is 13 right?")], [lookup])

    group, _engine, _other = await play(judged, thread=thread, group_size=1, records=True)
    recording = decode(group.episodes[0].recording or b"", Recording)
    with pytest.raises(ReplayError, match=r"it is '.*13 right.*in the recording '.*12 right"):
        await rerun(recording, otherwise, tokenizer=POLICY, tokenizers={"llama": JUDGE})
