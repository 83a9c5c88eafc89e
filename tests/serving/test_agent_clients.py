"""Unmodified agent libraries with their default settings: against a server whose engine writes
given texts, so that they call their tools, and against `millrace serve` with a tiny random model.

`make test-clients` installs the libraries in an environment of their own.
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_model import make_chat_model
from families import FAMILIES, tokenizer_of
from project import Command, make_project, steps_in
from safetensors.numpy import load_file
from server_process import KEY, ServerProcess, server_process
from writing_engine import WritingEngine, served

pytest.importorskip("agents", reason="make test-clients installs them")

CONTEXT = 32768  # a token is a character, and agents have long instructions
ANSWER = "It is 12."


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class AgentEngine(WritingEngine):
    """Writes one text after another."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.left = list(texts)

    async def generate(self, request, on_tokens=None, on_completion=None):
        self.texts = (self.left.pop(0),)
        return await super().generate(request, on_tokens)


def ask_openai_agents(url: str, key: str, *, stream: bool = False) -> str:
    """Uses /v1/responses, with a tool."""
    import agents
    from openai import AsyncOpenAI

    @agents.function_tool
    def lookup(key: str) -> int:
        """Look up a number."""
        return 12 if key == "a" else 0

    async def run() -> str:
        async with AsyncOpenAI(base_url=url, api_key=key) as client:
            agents.set_default_openai_client(client, use_for_tracing=False)
            agents.set_tracing_disabled(True)
            agent = agents.Agent(name="A", instructions="Be brief.", model="tiny", tools=[lookup])
            if not stream:
                return (await agents.Runner.run(agent, "How much is a?")).final_output
            result = agents.Runner.run_streamed(agent, "How much is a?")
            kinds = [event.type async for event in result.stream_events()]
            assert "raw_response_event" in kinds
            return result.final_output

    return asyncio.run(run())


def ask_openai_agents_streaming(url: str, key: str) -> str:
    return ask_openai_agents(url, key, stream=True)


def ask_pydantic_ai(url: str, key: str) -> str:
    import pydantic_ai
    from pydantic_ai.models import infer_model
    from pydantic_ai.providers.openai import OpenAIProvider

    model = infer_model("openai:tiny", lambda _: OpenAIProvider(base_url=url, api_key=key))
    agent = pydantic_ai.Agent(model, instructions="Be brief.")

    @agent.tool_plain
    def lookup(key: str) -> int:
        """Look up a number."""
        return 12 if key == "a" else 0

    return agent.run_sync("How much is a?").output


def ask_langchain(url: str, key: str, **settings: Any) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    def lookup(key: str) -> int:
        """Look up a number."""
        return 12 if key == "a" else 0

    model = ChatOpenAI(model="tiny", base_url=url, api_key=key, **settings)
    agent = create_agent(model, tools=[lookup], system_prompt="Be brief.")
    question = {"role": "user", "content": "How much is a?"}
    return str(agent.invoke({"messages": [question]})["messages"][-1].text)


def ask_langchain_by_responses(url: str, key: str) -> str:
    return ask_langchain(url, key, use_responses_api=True)


LOOKUP = {
    "name": "lookup",
    "description": "Look up a number.",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
}


# litellm has no agent. It is the client that agents of other libraries use, so the loop is here.
def ask_litellm(url: str, key: str) -> str:
    import litellm

    messages: list[Any] = [{"role": "user", "content": "How much is a?"}]
    where = {"model": "openai/tiny", "api_base": url, "api_key": key}
    tools = [{"type": "function", "function": LOOKUP}]
    while True:
        reply = litellm.completion(messages=messages, tools=tools, **where)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for one in message.tool_calls:
            assert json.loads(one.function.arguments) == {"key": "a"}
            messages.append({"role": "tool", "tool_call_id": one.id, "content": "12"})


def ask_litellm_by_responses(url: str, key: str) -> str:
    import litellm

    items: list[Any] = [{"role": "user", "content": "How much is a?"}]
    where = {"model": "openai/tiny", "api_base": url, "api_key": key}
    while True:
        reply = litellm.responses(input=items, tools=[{"type": "function", **LOOKUP}], **where)
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        items += [
            {"type": "function_call_output", "call_id": one.call_id, "output": "12"}
            for one in calls
        ]


def ask_smolagents(url: str, key: str) -> str:
    import smolagents

    @smolagents.tool
    def lookup(key: str) -> int:
        """Look up a number.

        Args:
            key: its name
        """
        return 12 if key == "a" else 0

    model = smolagents.OpenAIModel(model_id="tiny", api_base=url, api_key=key)
    agent = smolagents.ToolCallingAgent(tools=[lookup], model=model, max_steps=3, verbosity_level=0)
    return str(agent.run("How much is a?"))


CLIENTS: dict[str, Callable[[str, str], str]] = {
    "openai-agents": ask_openai_agents,
    "openai-agents, streaming": ask_openai_agents_streaming,
    "pydantic-ai": ask_pydantic_ai,
    "langchain-openai": ask_langchain,
    "langchain-openai, responses": ask_langchain_by_responses,
    "litellm": ask_litellm,
    "litellm, responses": ask_litellm_by_responses,
    "smolagents": ask_smolagents,
}


@pytest.mark.parametrize("client", CLIENTS)
async def test_agent_calls_its_tool_and_returns_the_answer(client: str):
    last = call("final_answer", answer=ANSWER) if client == "smolagents" else ANSWER
    engine = AgentEngine("I look." + call("lookup", key="a"), last)
    async with served(engine, key=KEY, max_context=CONTEXT) as http:
        url = str(http.base_url).removesuffix("/")
        found = await asyncio.to_thread(CLIENTS[client], url, KEY)
    assert found == ANSWER
    first, second = engine.requests
    assert len(first.prompt) < len(second.prompt)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # Its tokens are bytes: smolagents requires tool calls, which needs a tokenizer that grammars
    # are compiled for.
    tokenizer, folder = tokenizer_of(FAMILIES["chatml"]), tmp_path_factory.mktemp("model")
    model = make_chat_model(folder, max_context=CONTEXT, tokenizer=tokenizer)
    logs = tmp_path_factory.mktemp("logs")
    with server_process(model, logs=logs) as process:
        yield process


@pytest.mark.parametrize("client", CLIENTS)
def test_agent_gets_the_text_of_a_real_model(client: str, server: ServerProcess):
    assert CLIENTS[client](f"{server.url}/v1", KEY)


PROGRAM = """
import json, sys
import agents

agents.set_tracing_disabled(True)
task = json.loads(sys.stdin.readline())
agent = agents.Agent(name="A", instructions="Answer with digits.", model="policy")
first = agents.Runner.run_sync(agent, task["prompt"])
again = [*first.to_input_list(), {"role": "user", "content": "Once more."}]
print(agents.Runner.run_sync(agent, again).final_output)
"""
SCORE = """
def prints_digits(task, result):
    text = result.stdout
    # Lengths make it unlikely that two rewards are equal, of which nothing is learned.
    return sum(c.isdigit() for c in text) / (len(text) + 1) + len(text) / 1000
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_trains_an_agent_of_openai_agents_that_knows_nothing_of_it(tmp_path: Path):
    make_project(
        tmp_path,
        environment={"command": ["python", "agent.py"], "score": "score.py:prints_digits"},
        rollout={"group_size": 2, "max_running_groups": 1},
        trainer={"groups_per_step": 1, "steps": 2},
        # The library raises an error for a reply at its token limit, so replies must end before.
        sampling={"max_new_tokens": 256, "stop": list("abcdefghijklmnop")},
    )
    shutil.rmtree(tmp_path / "model")
    make_chat_model(tmp_path / "model", max_context=2048)
    (tmp_path / "agent.py").write_text(PROGRAM)
    (tmp_path / "score.py").write_text(SCORE)
    code, _, stderr = Command("train", "run.toml", folder=tmp_path).finish(timeout_s=500)
    assert code == 0, stderr
    assert steps_in(tmp_path / "run/metrics.jsonl") == [1, 2]
    lines = (tmp_path / "run/rollouts/step_2.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines]
    assert episodes
    assert all(len(episode["turns"]) == 2 for episode in episodes)
    before = load_file(tmp_path / "model/model.safetensors")
    trained = load_file(tmp_path / "run/checkpoints/step_2/model.safetensors")
    assert any((trained[name] != weight).any() for name, weight in before.items())
    assert not (tmp_path / "run/logs/programs.log").exists()
