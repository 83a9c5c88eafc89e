"""The agent that an environment talks to: messages or text in, replies out, every token recorded.

    reply = await agent.chat(messages, tools=[search])
    messages += [reply.message, *await agent.call_tools(reply)]

An Agent belongs to one episode and runs on the event loop of the environments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.core.errors import TaskError, suggestion
from millrace.core.records import Ending, FinishReason, Message, Prompt, Rollout, Sampling
from millrace.environments.replay.schema import AgentRow, EpisodeOver
from millrace.environments.rollouts.renderer import Conversation, EncodedPrompt
from millrace.environments.token_record import Exchange, TokenRecord
from millrace.environments.tools.calls import Parsed, ToolCall
from millrace.environments.tools.functions import Tool, tools_of
from millrace.models.grammars import grammar_of

if TYPE_CHECKING:
    from millrace.environments.episode_state import EpisodeState


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reply:
    """One reply of a model."""

    text: str  # as sampled, without the stop string or token
    message: Message  # to append to the conversation
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()  # malformed tool calls, described for the model
    finish: FinishReason
    prompt: Prompt = field(repr=False)
    inherited: str = ""  # text that a fork shares with the forked reply
    exchange: Exchange = field(repr=False)
    tools: Mapping[str, Tool] = field(repr=False, default_factory=dict[str, Tool])
    forked: Exchange | None = field(repr=False, default=None)  # the exchange that was forked

    @property
    def wants_tools(self) -> bool:
        """True if the reply calls tools, or tried to."""
        return bool(self.tool_calls or self.problems)

    @property
    def num_recomputed(self) -> int:
        """Tokens before a fork whose KV was recomputed with other weights than the original's."""
        ours, theirs = self.exchange.completion.kv, self.forked and self.forked.completion.kv
        if ours is None or theirs is None:
            return 0
        return ours.num_other(theirs, num_tokens=self.exchange.start)

    @property
    def recomputed(self) -> bool:
        """True if a fork continues from recomputed KV, because the weights changed and the old KV
        was evicted. A partly filled block is always recomputed and does not count."""
        kv = self.exchange.completion.kv
        return kv is not None and self.num_recomputed >= kv.block_tokens


class Agent:
    def __init__(self, state: "EpisodeState", row: AgentRow) -> None:
        if row.model not in state.models:
            defined = ", ".join(filter(None, state.models)) or "none"
            raise TaskError(
                f"The role {row.name!r} names the model {row.model!r}, which is not in"
                f" environment.models; defined models: {defined}."
            )
        self.row = row
        self.sampling = state.settings.sampling  # default settings of chat() and complete()
        self.record = TokenRecord()
        self.tools: tuple[Tool, ...] = ()  # tools of the run's MCP servers
        model = state.models[row.model]
        self.tool_format = model.tool_format
        self._conversation = Conversation(
            model.renderer, history=state.settings.history, counts=state.counts
        )
        self.decode = model.renderer.decode
        self._state = state
        self._num_forks = 0  # unpinned forks, each in a session of its own

    def role(
        self,
        name: str,
        *,
        adapter: str | None = None,
        model: str | None = None,
        trained: bool | None = None,
        lag: int = 0,
    ) -> "Agent":
        """Return the agent of this episode with that name; it keeps conversations of its own. The
        policy plays the role, unless the role names an adapter of engine.adapters, "base", or a
        model of environment.models. If the run has several policies, the one with that name plays
        it. Tokens of a policy are trained unless `trained` is False; tokens of other models never
        are. With `lag`, the version of the policy `model` from `lag` versions ago plays it;
        policies.NAME.lags lists these."""
        if not name:
            raise TaskError("agent.role needs a name; give the role one.")
        if adapter is not None and model is not None:
            raise TaskError(
                f"The role {name!r} names both the adapter {adapter!r} and the model {model!r}, but"
                " adapters belong to the policy's model; remove one of them."
            )
        other = f"adapter {adapter!r}" if adapter is not None else f"model {model!r}"
        is_policy = adapter is None and model is None
        if trained and not is_policy:
            raise TaskError(
                f"The role {name!r} uses the {other}, which is never trained; remove"
                f" trained=True, or the {other.partition(' ')[0]}."
            )
        is_trained = is_policy if trained is None else trained
        policies = self._state.settings.policies
        if is_policy and name in policies[1:]:
            model = name
        elif is_trained and policies and name not in policies:
            raise TaskError(
                f"The role {name!r} is none of [policies];"
                f" {suggestion(name, policies, otherwise='policies')} A role that is not trained"
                " needs trained=False."
            )
        if lag:
            adapter, model = self._lagged(name, model, lag), None
        elif model in policies and model not in self._state.models:  # an adapter, or the first
            adapter, model = None if model == policies[0] else model, None
        row = AgentRow(name=name, adapter=adapter, model=model, is_trained=is_trained)
        return self._state.agent(row)

    def _lagged(self, name: str, model: str | None, lag: int) -> str:
        """The adapter that is an earlier version of a policy."""
        known = self._state.settings.lagged
        found = [adapter for adapter, own in known.items() if own == (model, lag)]
        if not found:
            kept = ", ".join(f"model={policy!r}, lag={n}" for policy, n in known.values())
            raise TaskError(
                f"The role {name!r} has model={model!r} and lag={lag}, which engines do not keep;"
                f" they keep {kept or 'none'}, as policies.NAME.lags says."
            )
        return found[0]

    @property
    def rng(self) -> np.random.Generator:
        """Random generator for the environment, shared by all agents of the episode. Its seed comes
        from the run, the group and the episode number; a replay repeats its draws."""
        return self._state.rng

    def end(self, ending: Ending) -> EpisodeOver:
        """End the episode and stop sampling; raise the returned exception to leave your code."""
        return self._state.end(ending)

    async def chat(
        self,
        messages: Sequence[Message | Reply],
        tools: Sequence[Tool | Callable[..., Any]] | None = None,
        **sampling: Any,
    ) -> Reply:
        """Sample the model's next message; `sampling` overrides [sampling] settings for it. Raises
        EpisodeOver when the episode reaches a limit; environments need not catch it."""
        rows = _checked(messages)
        by_name = tools_of(tools or ())
        shown, in_template = self.tool_format.shown(rows, _schemas(by_name))
        encoded = self._conversation.of_messages(shown, tools=in_template)
        return await self._turn(rows, encoded, sampling, tools=by_name)

    async def complete(self, prompt: str, **sampling: Any) -> Reply:
        """Sample a continuation of a text; otherwise like chat(). A prompt that begins with an
        earlier prompt and its reply continues from their tokens."""
        if not isinstance(prompt, str):
            raise TaskError(
                f"agent.complete needs a text, not {prompt!r:.80}; use agent.chat for messages."
            )
        return await self._turn(prompt, self._conversation.of_text(prompt), sampling)

    async def fork(
        self, reply: Reply, *, at: int = 0, pinned: bool = True, **sampling: Any
    ) -> Reply:
        """Sample another reply that shares the first `at` sampled tokens of this one. A fork of a
        fork also shares what its parent inherited. A pinned fork goes to the engine that sampled
        the shared tokens and reuses their KV there without prefill; with kv = "keep" it does so
        even if the weights have changed since. If the engine has evicted that KV, it recomputes it
        with its current weights and sets `recomputed`. An unpinned fork goes to any engine and
        reuses only KV of the current weights, with which new tokens are always sampled."""
        if "response_format" in sampling:
            raise TaskError(
                "agent.fork cannot take a response_format, which applies to a whole reply; pass it"
                " to agent.chat."
            )
        num_sampled = len(reply.exchange.completion.tokens)
        if not 0 <= at < num_sampled:
            raise TaskError(
                f"agent.fork got at = {at}, but the reply has {num_sampled} sampled tokens; choose"
                f" a number from 0 to {num_sampled - 1}."
            )
        encoded, kept = self._conversation.within(reply.exchange, at)
        self._num_forks += 0 if pinned else 1
        session = self.row.name if pinned else f"{self.row.name}/unpinned {self._num_forks}"
        fork = await self._turn(
            reply.prompt,
            encoded,
            sampling,
            inherited=reply.inherited + kept,
            tools=reply.tools,
            forked=reply.exchange,
            session=session,
            pinned=pinned,
        )
        self._state.counts["forks"] += 1
        self._state.counts["forks_recomputed"] += pinned and fork.recomputed
        return fork

    async def call_tools(self, reply: Reply) -> list[Message]:
        """Run the tool calls of a reply in order; return the messages with their results."""
        messages: list[Message] = []
        for call in reply.tool_calls:
            result = await self._state.call_tool(call, reply.tools)
            messages.append(self.tool_format.result(call, result))
        self._state.counts["malformed_calls"] += len(reply.problems)
        if reply.problems:
            messages.append({"role": "user", "content": "\n".join(reply.problems)})
        return messages

    async def run(
        self,
        messages: Sequence[Message | Reply],
        tools: Sequence[Tool | Callable[..., Any]],
        **sampling: Any,
    ) -> list[Message]:
        """Chat and call tools until a reply calls none; return all messages, that reply last."""
        rows = _checked(messages)
        while True:
            reply = await self.chat(rows, tools, **sampling)
            rows = [*rows, reply.message]
            if not reply.wants_tools:
                return rows
            rows += await self.call_tools(reply)

    def rollouts(self, places: Mapping[Exchange, int] | None = None) -> tuple[Rollout, ...]:
        """Return the trained tokens sampled so far; `places` as in TokenRecord."""
        if not self.row.is_trained:
            return ()
        policy = self._state.settings.policy_of(self.row)
        rollouts = self.record.rollouts(places)
        return tuple(replace(r, agent=self.row.name, policy=policy) for r in rollouts)

    async def _turn(
        self,
        prompt: Prompt,
        encoded: EncodedPrompt,
        changes: dict[str, Any],
        *,
        inherited: str = "",
        tools: Mapping[str, Tool] | None = None,
        forked: Exchange | None = None,
        **routing: Any,
    ) -> Reply:
        """Sample and parse a reply, and register it so that later prompts can extend it."""
        exchange = await self._state.turn(
            encoded, agent=self, prompt=prompt, sampling=self._settings(changes), **routing
        )
        tools = tools or {}
        text = inherited + exchange.completion.text
        schemas = _schemas(tools)
        parsed = self.tool_format.parse(text, schemas) if tools else Parsed(content=text)
        message = self.tool_format.reply(text, parsed)
        if isinstance(prompt, str):
            self._conversation.replied_to_text(prompt + inherited, exchange)
        else:
            shown, in_template = self.tool_format.shown(prompt, schemas)
            self._conversation.replied_to_messages([*shown, message], exchange, tools=in_template)
        return Reply(
            text=text,
            message=message,
            tool_calls=parsed.calls,
            problems=parsed.problems,
            finish=exchange.completion.finish,
            prompt=prompt,
            inherited=inherited,
            exchange=exchange,
            tools=tools,
            forked=forked,
        )

    def _settings(self, changes: dict[str, Any]) -> Sampling:
        if not changes:
            return self.sampling
        if isinstance(stop := changes.get("stop"), str | list):
            changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        if "response_format" in changes:
            changes["grammar"] = grammar_of(changes.pop("response_format"))
        try:
            changed = replace(self.sampling, **changes)
        except TypeError:
            unknown = ", ".join(sorted(set(changes) - set(Sampling.__dataclass_fields__)))
            raise TaskError(
                f"agent.chat got {unknown}, which is not a [sampling] setting; valid settings are"
                f" {', '.join(Sampling.__dataclass_fields__)}."
            ) from None
        if self.row.is_trained and changed.temperature == 0 != self.sampling.temperature:
            raise TaskError(
                "agent.chat got temperature = 0, but greedy tokens cannot be trained; raise the"
                " temperature, or take a role with trained=False."
            )
        if self.row.is_trained and changed.adjusts_logits:
            raise TaskError(
                "Tokens that are sampled with presence_penalty, frequency_penalty or logit_bias"
                " cannot be trained, because they are not samples of the policy; remove them, or"
                " take a role with trained=False."
            )
        if self.row.is_trained and changed.grammar is not None and not changed.truncates:
            raise TaskError(
                "A reply that is constrained by a response_format or tool_choice keeps too many"
                " candidate ids per token to train on; set sampling.top_k, or take a role with"
                " trained=False."
            )
        return changed


def _schemas(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    return [tool.schema for tool in tools.values()]


def _checked(messages: Sequence[Message | Reply]) -> list[Message]:
    """Return the messages as dicts; raise TaskError for one that no template can render."""
    if isinstance(messages, str) or not messages:
        raise TaskError(f"agent.chat needs a list of messages, not {messages!r:.80}.")
    rows = [row.message if isinstance(row, Reply) else row for row in messages]
    for index, row in enumerate(rows):
        match row:  # some templates silently skip missing keys
            case {"role": str(), "content": str() | list()}:
                continue
            case {"role": str(), "tool_calls": calls} if calls and row.get("content") is None:
                continue
        raise TaskError(
            f"Message {index} is {row!r:.80}; a message is a dict with a 'role' and a text as its"
            " 'content'."
        )
    return rows
