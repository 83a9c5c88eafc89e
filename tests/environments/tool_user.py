"""An environment with one tool, and a model that uses it."""

from chat_engine import user


def lookup(key: str) -> str:
    """The value of a key."""
    if key == "broken":
        raise KeyError(key)
    return {"a": "12"}[key]


async def with_a_tool(task, agent):
    messages = [user(f"What is {task.prompt}?")]
    for _ in range(4):
        reply = await agent.chat(messages, tools=[lookup])
        messages += [reply.message, *await agent.call_tools(reply)]
        if not reply.wants_tools:
            return float(reply.text == task.columns["value"])
    return 0.0


def caller(prompt: str) -> str:
    """Calls the tool, and says what it returned."""
    if "<tool_response>" not in prompt:
        return '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>'
    return prompt.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
