"""What an environment talks to: messages or text in, replies out, every token recorded.

    reply = await agent.chat(messages, tools=[search])
    messages += [reply.message, *await agent.call_tools(reply)]

Belongs to one episode and to the event loop of the environments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from millrace.core.errors import TaskError
from millrace.core.records import Ending, Finish, Message, Prompt, Rollout, Sampling
from millrace.environments.conversation import Beginning, Conversation
from millrace.environments.episode_state import EpisodeState, Speaker
from millrace.environments.limits import EpisodeOver
from millrace.environments.token_record import Exchange, TokenRecord
from millrace.environments.tools.calls import Parsed, ToolCall, ToolFormat
from millrace.environments.tools.functions import Tool, tools_of
from millrace.models.grammars import grammar_of

MALFORMED = "malformed_calls"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reply:
    text: str  # as it was sampled, without what ended it
    message: Message  # to go on with
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()  # with calls that could not be read; for the model
    finish: Finish
    prompt: Prompt = field(repr=False)  # that it answers
    inherited: str = ""  # of a fork: what it shares with the reply that was forked
    exchange: Exchange = field(repr=False)
    tools: Mapping[str, Tool] = field(repr=False, default_factory=dict[str, Tool])
    forked: Exchange | None = field(repr=False, default=None)  # of a fork: that of the first reply

    @property
    def wants_tools(self) -> bool:
        """True if call_tools() has something to say to it."""
        return bool(self.tool_calls or self.problems)

    @property
    def num_recomputed(self) -> int:
        """Of a fork: tokens before it whose KV other weights computed than for the first reply."""
        if self.forked is None:
            return 0
        ours, theirs = self.exchange.completion.kv, self.forked.completion.kv
        if ours is None or theirs is None:
            return 0
        return ours.num_other(theirs, num_tokens=self.exchange.start)

    @property
    def recomputed(self) -> bool:
        """True if a fork goes on from other KV than the first reply did, because weights have
        changed and the KV is gone. What fills no whole block is computed anew in any case."""
        kv = self.exchange.completion.kv
        return kv is not None and self.num_recomputed >= kv.block_tokens


class Agent:
    def __init__(
        self,
        *,
        play: EpisodeState,
        conversation: Conversation,
        tool_format: ToolFormat,
        sampling: Sampling,
        name: str = "",
        adapter: str | None = None,
        model: str | None = None,
        max_context: int | None = None,
        is_trained: bool = True,
        cast: Callable[..., "Agent"],
    ) -> None:
        """`model`: where it is not the run's, with its longest context. `cast` gives the agents of
        the episode by name, as Cast.agent does."""
        self.name = name
        self.adapter = adapter
        self.model = model
        self.is_trained = is_trained
        self._play = play
        self._conversation = conversation
        self._format = tool_format
        self._sampling = sampling
        self._cast = cast
        self._record = TokenRecord()
        self._voice = Speaker(
            agent=name,
            adapter=adapter,
            model=model,
            max_context=max_context,
            is_trained=is_trained,
            record=self._record,
        )
        self._num_forks = 0  # with KV of their own
        self.tools: tuple[Tool, ...] = ()  # what the run offers the agent of an environment

    def role(
        self,
        name: str,
        *,
        adapter: str | None = None,
        model: str | None = None,
        trained: bool | None = None,
    ) -> "Agent":
        """Another agent of this episode, with conversations of its own; the same each time.

        It is the policy, unless it names one of engine.adapters, or "base", or one of
        environment.models. What the policy says in a role is trained unless `trained` is False;
        what others say never is.
        """
        if not name:
            raise TaskError("agent.role was given no name; give the role one.")
        if adapter is not None and model is not None:
            raise TaskError(
                f"The role {name!r} has the adapter {adapter!r} and the model {model!r}, but"
                " adapters belong to the policy's model; leave out one."
            )
        other = f"adapter {adapter!r}" if adapter is not None else f"model {model!r}"
        is_policy = adapter is None and model is None
        if trained and not is_policy:
            raise TaskError(
                f"The role {name!r} has the {other}, which is never trained; leave out"
                f" trained = True, or the {other.partition(' ')[0]}."
            )
        is_trained = is_policy if trained is None else trained
        return self._cast(name, adapter=adapter, model=model, is_trained=is_trained)

    @property
    def tool_format(self) -> ToolFormat:
        return self._format

    @property
    def sampling(self) -> Sampling:
        """How it samples where chat() is told nothing else."""
        return self._sampling

    @property
    def rng(self) -> np.random.Generator:
        """For what its environment leaves to chance: seeded by the run, the group and the number of
        the episode, and the same in a replay. One for all agents of the episode."""
        return self._play.rng

    @property
    def decode(self) -> Callable[[np.ndarray], str]:
        return self._conversation.decode

    def end(self, ending: Ending) -> EpisodeOver:
        """Mark the episode, for which nothing more is sampled; raise what this returns to leave its
        environment."""
        return self._play.end(ending)

    async def chat(
        self,
        messages: Sequence[Message | Reply],
        tools: Sequence[Tool | Callable[..., Any]] | None = None,
        **sampling: Any,
    ) -> Reply:
        """The model's next message; `sampling` changes settings of [sampling] for this one.

        Raises EpisodeOver when the episode may not go on, which need not be caught.
        """
        rows = _checked(messages)
        by_name = tools_of(tools or ())
        shown, in_template = self._format.shown(rows, _schemas(by_name))
        beginning = self._conversation.of_messages(shown, tools=in_template)
        exchange = await self._exchange(beginning, prompt=rows, sampling=sampling)
        return self._reply(rows, exchange, tools=by_name)

    async def complete(self, prompt: str, **sampling: Any) -> Reply:
        """What the model writes after a text, as chat() otherwise. A prompt that begins with an
        earlier one and its reply goes on from there."""
        if not isinstance(prompt, str):
            raise TaskError(
                f"agent.complete was given {prompt!r:.80}; give it a text, or use chat."
            )
        beginning = self._conversation.of_text(prompt)
        exchange = await self._exchange(beginning, prompt=prompt, sampling=sampling)
        return self._reply(prompt, exchange)

    async def fork(
        self, reply: Reply, *, at: int = 0, pinned: bool = True, **sampling: Any
    ) -> Reply:
        """Another reply that begins with the first `at` tokens that were sampled for this one,
        and with what this one, if it is a fork itself, shares with another.

        `pinned`: it goes to the engine that sampled these tokens, and on from their KV as it lies
        there, which costs no prefill; with kv = "keep" also if weights have changed since. Where
        the engine has given it up, it is computed by the weights served now, and the fork says so
        (`recomputed`). Else it goes anywhere, and uses KV of the weights served now only. What is
        new in it is sampled by these in either case.
        """
        if "response_format" in sampling:
            raise TaskError("agent.fork was given a response_format, which begins with a reply.")
        num_sampled = len(reply.exchange.completion.tokens)
        if not 0 <= at < num_sampled:
            raise TaskError(
                f"agent.fork was given at = {at}, but the reply has {num_sampled} sampled tokens;"
                f" choose one of 0 to {num_sampled - 1}."
            )
        beginning, kept = self._conversation.within(reply.exchange, at)
        self._num_forks += 0 if pinned else 1
        session = self.name if pinned else f"{self.name}/unpinned {self._num_forks}"
        exchange = await self._exchange(
            beginning, prompt=reply.prompt, sampling=sampling, session=session, pinned=pinned
        )
        inherited = reply.inherited + kept
        fork = self._reply(
            reply.prompt, exchange, inherited=inherited, tools=reply.tools, forked=reply.exchange
        )
        self._play.counts["forks"] += 1
        self._play.counts["forks_recomputed"] += pinned and fork.recomputed
        return fork

    async def call_tools(self, reply: Reply) -> list[Message]:
        """Run what a reply calls, one after the other; returns what the model is told of it."""
        messages: list[Message] = []
        for call in reply.tool_calls:
            told = await self._play.call_tool(call, reply.tools)
            messages.append(self._format.result(call, told))
        self._play.counts[MALFORMED] += len(reply.problems)
        if reply.problems:
            messages.append({"role": "user", "content": "\n".join(reply.problems)})
        return messages

    async def run(
        self,
        messages: Sequence[Message | Reply],
        tools: Sequence[Tool | Callable[..., Any]],
        **sampling: Any,
    ) -> list[Message]:
        """Chat and call tools until a reply calls none; returns all messages, that reply last."""
        rows = _checked(messages)
        while True:
            reply = await self.chat(rows, tools, **sampling)
            rows = [*rows, reply.message]
            if not reply.wants_tools:
                return rows
            rows += await self.call_tools(reply)

    def rollouts(self, places: Mapping[Exchange, int] | None = None) -> tuple[Rollout, ...]:
        """What it sampled so far, if that is trained; `places` as in TokenRecord."""
        if not self.is_trained:
            return ()
        rollouts = self._record.rollouts(places)
        return tuple(replace(rollout, agent=self.name) for rollout in rollouts)

    @property
    def counts(self) -> Mapping[str, int]:
        return self._conversation.counts

    def _reply(
        self,
        prompt: Prompt,
        exchange: Exchange,
        *,
        inherited: str = "",
        tools: Mapping[str, Tool] | None = None,
        forked: Exchange | None = None,
    ) -> Reply:
        """Of an exchange, from which later prompts may go on now."""
        tools = tools or {}
        text = inherited + exchange.completion.text
        schemas = _schemas(tools)
        parsed = self._format.parse(text, schemas) if tools else Parsed(content=text)
        message = self._format.reply(text, parsed)
        if isinstance(prompt, str):
            self._conversation.replied_to_text(prompt + inherited, exchange)
        else:
            shown, in_template = self._format.shown(prompt, schemas)
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

    async def _exchange(
        self,
        beginning: Beginning,
        *,
        prompt: Prompt,
        sampling: Mapping[str, Any],
        session: str | None = None,
        pinned: bool = False,
    ) -> Exchange:
        return await self._play.turn(
            beginning,
            voice=self._voice,
            prompt=prompt,
            sampling=self._settings(sampling),
            session=self.name if session is None else session,
            pinned=pinned,
        )

    def _settings(self, changes: Mapping[str, Any]) -> Sampling:
        if not changes:
            return self._sampling
        if isinstance(changes.get("stop"), str | list):
            stop = changes["stop"]
            changes = {**changes, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
        if "response_format" in changes:
            grammar = grammar_of(changes["response_format"])
            others = {k: v for k, v in changes.items() if k != "response_format"}
            changes = {**others, "grammar": grammar}
        try:
            changed = replace(self._sampling, **changes)
        except TypeError:
            unknown = ", ".join(sorted(set(changes) - set(Sampling.__dataclass_fields__)))
            raise TaskError(
                f"agent.chat was given {unknown}, which is no setting of [sampling]; there are"
                f" {', '.join(Sampling.__dataclass_fields__)}."
            ) from None
        if self.is_trained and changed.temperature == 0 != self._sampling.temperature:
            raise TaskError(
                "agent.chat was given temperature = 0, which leaves nothing to learn; raise it."
            )
        if self.is_trained and changed.grammar is not None and not changed.truncates:
            raise TaskError(
                "A reply that must follow a response_format or tool_choice is drawn from ids that"
                " are too many to train with; set sampling.top_k, or take a role with"
                " trained=False."
            )
        return changed


def _schemas(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    return [tool.schema for tool in tools.values()]


def _checked(messages: Sequence[Message | Reply]) -> list[Message]:
    """As dicts; raises TaskError for what no template could render."""
    if isinstance(messages, str) or not messages:
        raise TaskError(f"agent.chat was given {messages!r:.80}; give it a list of messages.")
    rows = [row.message if isinstance(row, Reply) else row for row in messages]
    for index, row in enumerate(rows):
        # Some templates would leave out what they do not find, in silence.
        if not isinstance(row, dict) or not isinstance(row.get("role"), str) or not _says(row):
            raise TaskError(
                f"Message {index} is {row!r:.80}; a message is a dict with a role and content that"
                " is text."
            )
    return rows


def _says(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, str | list) or bool(content is None and message.get("tool_calls"))
