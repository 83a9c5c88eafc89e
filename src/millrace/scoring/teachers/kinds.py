"""The kinds of [[scorer]] that are language models: "teacher", "self_teacher", "reference".

Each is a model in a process of its own, except a teacher that is served elsewhere (remote.py), and
a reference in a LoRA run: there the trainer has the starting weights beneath its adapter, and asks
them itself (see Trainer).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.cluster.messages import StartTeacher
from millrace.core.errors import ConfigError
from millrace.core.protocols import Scorer
from millrace.core.records import Group, Task, Verdict
from millrace.models.directory import load_tokenizer, text_config, vocabulary_checksum
from millrace.models.weight_file import version_in
from millrace.scoring.scorer_kind import CallRules, RunFacts, ScorerTools
from millrace.scoring.services.endpoint import Endpoint, check_endpoint, check_texts
from millrace.scoring.teachers.process import TeacherProcess
from millrace.scoring.teachers.remote import MAX_ANSWER_BYTES, RemoteTeacher
from millrace.scoring.teachers.scorers import (
    FollowingScorer,
    ReferenceScorer,
    TeacherScorer,
    teaches,
)
from millrace.scoring.teachers.settings import ReaderSettings, TeachingSettings, check_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher(TeachingSettings):
    """A model that never changes, with the policy's tokenizer: here, or served elsewhere."""

    model: str | None = None
    """Directory or hub name ..."""
    url: str | None = None
    """... or where `millrace serve MODEL --scorers N` answers, up to /score."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Sent there; their values may hold env:NAME."""

    def __post_init__(self) -> None:
        TeachingSettings.__post_init__(self)
        if (self.model is None) == (self.url is None):
            raise ValueError("a teacher is either a model or behind a url; set one of the two")
        if self.url is not None:
            check_texts(url=self.url)

    @property
    def default_name(self) -> str:
        return "teacher"

    def rules(self, *, num_workers: int) -> CallRules:
        return call_rules() if self.url is None else CallRules(timeout_s=300.0, batch=0)

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        check_tasks(self, tasks, name=name)
        if self.url is not None:
            check_endpoint(self.url, self.headers, scorer=name)

    def check_model(self, run: RunFacts, *, name: str) -> None:
        """One behind a url is checked when it is first asked, as the run starts."""
        if self.model is not None:
            check_same_tokens(self.model, run, num_top=self.num_top, name=name)

    def make(self, *, name: str, weight: float, rules: CallRules, tools: ScorerTools) -> Scorer:
        if self.model is None:
            reader, max_context = self._remote(name, rules=rules, run=tools.facts), None
        else:
            reader = _process(self, name=name, model=self.model, tools=tools)
            max_context = _context(self.model, tools.facts)
        return TeacherScorer(
            reader,
            self,
            weight=weight,
            timeout_s=rules.timeout_s,
            max_context=max_context,
            render=tools.facts.render,
        )

    def _remote(self, name: str, *, rules: CallRules, run: RunFacts) -> RemoteTeacher:
        assert self.url is not None
        endpoint = Endpoint(
            self.url,
            headers=self.headers,
            timeout_s=rules.timeout_s,
            scorer=name,
            max_answer_bytes=MAX_ANSWER_BYTES,
        )
        return RemoteTeacher(
            name,
            endpoint=endpoint,
            vocabulary=vocabulary_checksum(run.tokenizer),
            num_known=run.vocab_size,
            num_top=self.num_top,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTeacher(TeachingSettings):
    """The policy itself, as it was; refreshed from its versions while the run goes on."""

    lag: int | None = None
    """As it was so many versions ago ..."""
    ema: float | None = None
    """... or the moving average of its versions, which keeps so much of itself at each."""
    every: int = 1
    """Versions from one refresh to the next."""

    def __post_init__(self) -> None:
        TeachingSettings.__post_init__(self)
        if (self.lag is None) == (self.ema is None):
            raise ValueError("a self-teacher has either lag or ema; set one of the two")
        if self.lag is not None:
            check_whole("lag", self.lag, least=0)
        if self.ema is not None and not (isinstance(self.ema, float) and 0 < self.ema < 1):
            raise ValueError(f"ema = {self.ema!r} must be a number between 0 and 1")
        check_whole("every", self.every, least=1)

    @property
    def default_name(self) -> str:
        return "self_teacher"

    def rules(self, *, num_workers: int) -> CallRules:
        return call_rules()

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        check_tasks(self, tasks, name=name)

    def check_model(self, run: RunFacts, *, name: str) -> None:
        check_same_tokens(run.config.model.path, run, num_top=self.num_top, name=name)
        transport = run.config.weights.transport
        if transport == "collective" or (transport == "auto" and run.config.engine.remote > 0):
            raise ConfigError(
                f"Scorer {name!r} takes single versions, but weights.transport = {transport!r}"
                " broadcasts each of them to the engines alone; use another."
            )

    def make(self, *, name: str, weight: float, rules: CallRules, tools: ScorerTools) -> Scorer:
        following = {"lag": self.lag, "ema": self.ema, "every": self.every}
        model = tools.facts.model_path
        return FollowingScorer(
            _process(self, name=name, model=model, tools=tools, following=following),
            self,
            weight=weight,
            timeout_s=rules.timeout_s,
            max_context=_context(model, tools.facts),
            render=tools.facts.render,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference(ReaderSettings):
    """The model to stay close to, for loss.kl."""

    model: str | None = None
    """By default what the run starts from."""

    @property
    def default_name(self) -> str:
        return "reference"

    def rules(self, *, num_workers: int) -> CallRules:
        return call_rules()

    def check(self, tasks: Sequence[Task], *, name: str) -> None:
        """Whatever the task, its tokens can be compared."""

    def check_model(self, run: RunFacts, *, name: str) -> None:
        if self.model is not None:
            check_same_tokens(self.model, run, num_top=0, name=name)

    def make(self, *, name: str, weight: float, rules: CallRules, tools: ScorerTools) -> Scorer:
        if self.is_in_trainer(tools.facts):
            return TrainerReference(name, weight=weight)
        model = self.model or tools.facts.config.model.path
        return ReferenceScorer(
            _process(self, name=name, model=model, tools=tools),
            weight=weight,
            timeout_s=rules.timeout_s,
            max_context=_context(model, tools.facts),
        )

    def is_in_trainer(self, run: RunFacts) -> bool:
        """The starting weights are there anyway, beneath the adapter."""
        return run.config.lora is not None and self.model is None


class TrainerReference:
    """Stands for a reference that needs no process: it has nothing to say here."""

    only_notes = True

    def __init__(self, name: str, *, weight: float) -> None:
        self.name = name
        self.weight = weight

    async def score(self, group: Group) -> list[Verdict]:
        return [Verdict()] * len(group.episodes)


def call_rules() -> CallRules:
    """A group is read at once, as its episodes begin alike. What a model cannot read, it could not
    read again either, and a lost process is replaced without further ado."""
    return CallRules(timeout_s=300.0, concurrency=1024, batch=0, retries=0, breaker_failures=0)


def check_tasks(settings: TeachingSettings, tasks: Sequence[Task], *, name: str) -> None:
    """That it teaches some of them, and has a hint for each of these."""
    taught = [task for task in tasks if teaches(settings, task)]
    if tasks and not taught:
        place = "no [[tasks.source]] has such a name"
        if settings.column is not None:
            place = f"no task has such a value in its column {settings.column!r}"
        raise ConfigError(
            f"Scorer {name!r} teaches tasks = {list(settings.tasks)}, but {place}; correct them, or"
            " leave them out to teach all."
        )
    for task in taught:
        if settings.hint is not None and settings.hint not in task.columns:
            raise ConfigError(
                f"Scorer {name!r} takes its hint from column {settings.hint!r}, which task"
                f" {str(task.prompt)[:60]!r} does not have; it has"
                f" {', '.join(task.columns) or 'none'}."
            )


def check_same_tokens(model: str, run: RunFacts, *, num_top: int, name: str) -> None:
    """Token ids must mean to the teacher what they mean to the policy."""
    remote_code = run.config.model.trust_remote_code
    setting = f"model of scorer {name!r}"
    found = text_config(model, trust_remote_code=remote_code, setting=setting)
    theirs = load_tokenizer(model, trust_remote_code=remote_code).get_vocab()
    ours = run.tokenizer.get_vocab()
    if theirs != ours:
        differing = next(iter(sorted(theirs.items() ^ ours.items(), key=lambda item: item[::-1])))
        raise ConfigError(
            f"Scorer {name!r}: the tokenizer of {model!r} is another than that of"
            f" {run.config.model.path!r} (they differ in {differing[0]!r}, for one), so its"
            " judgement of tokens would be of other tokens; choose a model with the same tokenizer."
        )
    smallest = min(found.vocab_size, run.vocab_size)
    if found.vocab_size < len(ours) or num_top >= smallest:
        problem = f"top_k = {num_top}; lower that"
        if found.vocab_size < len(ours):
            problem = f"the policy's tokenizer has {len(ours)}; choose another model"
        raise ConfigError(f"Scorer {name!r} knows {smallest} tokens, and {problem}.")


def _process(
    settings: ReaderSettings,
    *,
    name: str,
    model: str,
    tools: ScorerTools,
    following: dict[str, Any] | None = None,
) -> TeacherProcess:
    run = tools.facts
    start = StartTeacher(
        config=run.config.model_dump(mode="json"),
        settings=settings.plain(),
        model_path=model,
        following=following,
        version=None if following is None else run.version,
        adapter_path=None if following is None else run.adapter_path,
        past=None if following is None else str(_past(name, tools)),
    )
    return TeacherProcess(
        name,
        start=start,
        worker_pool=tools.worker_pool,
        start_timeout_s=tools.start_timeout_s,
    )


def _past(name: str, tools: ScorerTools) -> Path:
    """Where a self-teacher keeps what it was."""
    path = (tools.folder / f"{name}.safetensors").absolute()
    if path.exists() and version_in(path) > tools.facts.version:
        path.unlink()  # of versions that this run, resumed from an earlier one, will make anew
    return path


def _context(model: str, run: RunFacts) -> int:
    """The longest sequence it reads."""
    config = text_config(model, trust_remote_code=run.config.model.trust_remote_code)
    limit = getattr(config, "max_position_embeddings", None)
    return limit if limit is not None else run.max_context
