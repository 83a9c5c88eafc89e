"""The agents of one episode, by role name. Runs on the event loop of the environments."""

from collections.abc import Mapping
from typing import Any

from millrace.core.errors import TaskError
from millrace.core.records import Rollout, Sampling
from millrace.environments.agent import Agent
from millrace.environments.conversation import Conversation, History
from millrace.environments.episode_state import EpisodeState
from millrace.environments.other_models import OtherModel
from millrace.environments.rollouts.renderer import Renderer
from millrace.environments.token_record import Exchange
from millrace.environments.tools.calls import ToolFormat


class AgentSet:
    """Creates and keeps the agents of one episode; the environment gets the unnamed one."""

    def __init__(
        self,
        state: EpisodeState,
        *,
        renderer: Renderer,
        history: History,
        tool_format: ToolFormat,
        sampling: Sampling,
        others: Mapping[str, OtherModel] | None = None,
    ) -> None:
        """`renderer` and `tool_format` belong to the policy; `others` are environment.models."""
        self.history: History = history
        self.tool_format = tool_format
        self.sampling = sampling
        self._state = state
        self._renderer = renderer
        self._others = others or {}
        self._agents: dict[str, Agent] = {}

    def agent(
        self,
        name: str = "",
        *,
        adapter: str | None = None,
        model: str | None = None,
        is_trained: bool = True,
    ) -> Agent:
        """Return the agent with this name, created on first use."""
        found = self._agents.get(name)
        if found is None:
            other = None if model is None else self._other(model, role=name)
            renderer = self._renderer if other is None else other.renderer
            found = self._agents[name] = Agent(
                state=self._state,
                conversation=Conversation(renderer, history=self.history),
                tool_format=self.tool_format if other is None else other.tool_format,
                sampling=self.sampling,
                name=name,
                adapter=adapter,
                model=model,
                max_context=None if other is None else other.max_context,
                is_trained=is_trained,
                agent_named=self.agent,
            )
        if (found.adapter, found.model, found.is_trained) != (adapter, model, is_trained):
            raise TaskError(
                f"The role {name!r} exists with adapter = {found.adapter!r}, model ="
                f" {found.model!r} and trained = {found.is_trained}; pass the same arguments every"
                " time."
            )
        return found

    def _other(self, model: str, *, role: str) -> OtherModel:
        if model in self._others:
            return self._others[model]
        known = ", ".join(self._others) or "none"
        raise TaskError(
            f"The role {role!r} names the model {model!r}, which is not in environment.models;"
            f" defined models: {known}."
        )

    @property
    def agents(self) -> list[Agent]:
        return list(self._agents.values())

    @property
    def others(self) -> dict[str, OtherModel]:
        """The other models that roles of this episode use, by name."""
        named = {agent.model for agent in self.agents}
        return {name: other for name, other in self._others.items() if name in named}

    @property
    def template_settings(self) -> dict[str, Any]:
        return self._renderer.template_settings

    @property
    def trained(self) -> set[str]:
        """Names of the agents with trained tokens."""
        return {rollout.agent for rollout in self.rollouts()}

    def rollouts(self, places: Mapping[Exchange, int] | None = None) -> tuple[Rollout, ...]:
        return tuple(rollout for agent in self.agents for rollout in agent.rollouts(places))

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for agent in self._agents.values():
            for name, count in agent.counts.items():
                counts[name] = counts.get(name, 0) + count
        return counts
