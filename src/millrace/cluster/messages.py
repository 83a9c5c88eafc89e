"""Every message between processes. One tagged union; anything else on a socket is refused.

Arrays travel as raw frames beside the message; see wire.py. A call has one reply: the message after
its arrow, or an Error; parts may precede it. An event is neither.
"""

from typing import Any, Literal

import msgspec
import numpy as np

from millrace.cluster.launchers.launcher import HostDevice, JoinSlot, ProcessExit
from millrace.core import records
from millrace.core.microbatch import Batch
from millrace.core.spans import Span


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


class Part(Message, frozen=True):
    """Base of messages about a call before its reply."""


# To and from any worker


class Stop(Message, frozen=True):
    """Finish and exit. -> Done"""


class Done(Message, frozen=True):
    """A reply without content."""


class Error(Message, frozen=True):
    """A reply: the call failed in the worker, which continues."""

    kind: str  # class name of the exception
    reason: str  # one sentence
    traceback: str


class Hello(Message, frozen=True):
    """Event: first message of a worker."""

    worker: str
    pid: int
    address: str = "127.0.0.1"  # of its host, as the controller and other hosts may reach it
    free_port: int = 0  # of its host, for a rendezvous of several workers


class WorkerProgress(Message, frozen=True):
    """Event, a few times per second: what the worker did since the last one."""

    spans: list[Span]
    counters: dict[str, float]  # e.g. tokens generated so far
    work: float = 0.0  # grows only while calls in flight make progress
    waits: bool = True  # it cannot make progress by itself, such as a paused engine


class Failed(Message, frozen=True):
    """Event: last message of a worker that fails."""

    reason: str
    traceback: str


# Between the controller and a host that joins: `millrace join`


class Join(Message, frozen=True):
    """From a host: it offers workers. -> JoinAdmitted"""

    host: str  # its name, for messages to the user
    num_workers: int
    role: str = "engine"  # of its workers
    devices: tuple[HostDevice, ...] = ()  # for them, in this order; its CPU last


class JoinAdmitted(Message, frozen=True):
    slots: list[JoinSlot]


class WorkerExited(Message, frozen=True):
    """Event of a host: one of its worker processes has ended."""

    worker: str
    exit: ProcessExit


class SignalWorker(Message, frozen=True):
    """Event for a host: end this worker process. WorkerExited follows."""

    worker: str
    action: Literal["terminate", "kill", "abort"]  # abort: dump its stacks to its log, then kill


class Heartbeat(Message, frozen=True):
    """Event for a host and its workers: the controller is alive. A worker sends it back."""


# Engine


class StartEngine(Message, frozen=True):
    """Load the model. -> Done"""

    config: dict[str, Any]  # RunConfig as plain data
    model_path: str  # the config's model, or a checkpoint of it
    version: int  # of those weights
    adapter_path: str | None = None  # in a LoRA run: the checkpoint whose adapter is applied
    policies: dict[str, tuple[str | None, int]] = {}  # of further ones: the same, and the version
    records_routes: bool = False  # record the experts of each token of a mixture of experts
    role: str = "engine"  # engines of one role receive weights together


class Generate(Message, frozen=True):
    """Sample n completions. Parts: Completed, TokensSampled if `stream`. -> GenerateDone, last"""

    request: records.Request
    stream: bool = False


class TokensSampled(Part, frozen=True):
    """Tokens sampled since the last such part."""

    pieces: list[records.CompletionChunk]


class Completed(Part, frozen=True):
    """Completions that ended before others of their request."""

    completions: dict[int, records.Completion]  # by their number in the request


class GenerateDone(Message, frozen=True):
    completions: dict[int, records.Completion]  # as in Completed; those that were not sent before


class SwapWeights(Message, frozen=True):
    """Stage, verify, and make visible between two forward passes. -> Swapped"""

    update: records.WeightUpdate


class Swapped(Message, frozen=True):
    version: int
    stage_ms: float  # beside decoding
    gap_ms: float  # pause between the two forward passes


class ScoreTokens(Message, frozen=True):
    """Score the tokens of these requests; to a teacher or an engine. -> TokensScored"""

    requests: list[records.ScoreRequest]  # those that share a prefix are computed together


class TokensScored(Message, frozen=True):
    logprobs: list[records.TokenLogprobs]


class AbortRequests(Message, frozen=True):
    """End these requests now, with the tokens they have. -> Done"""

    ids: list[str]


class LoadAdapter(Message, frozen=True):
    """Put a saved adapter into the place of a resident one, between two forward passes. -> Done"""

    name: str  # of engine.adapters; no running request uses it
    folder: str


class Expire(Message, frozen=True):
    """End the requests that expire and hold a token older than this version. -> Done"""

    before: int
    adapters: dict[str, int] = {}  # the same of requests with these adapters


class Pause(Message, frozen=True):
    """Generate nothing until Resume, but accept requests and swap weights. -> Done"""

    sleep: bool = False  # give back the memory of weights and KV, too


class Resume(Message, frozen=True):
    """Continue to generate; has no effect if the engine is not paused. -> Done"""


# Trainer


class StartTrainer(Message, frozen=True):
    """Load the model, or everything from a checkpoint directory. -> Done"""

    config: dict[str, Any]
    checkpoint: str | None
    rank: int = 0
    rendezvous: str = ""  # "tcp://HOST:PORT" where rank 0 listens for the others; "" = no FSDP
    own_address: str = ""  # of the rank's host; "" = it is on the controller's host
    peer_address: str = ""  # of another rank's host, if ranks are on several hosts
    num_sharing: int = 1  # ranks on the device of this one
    shares_device: bool = False  # whether any two ranks use one device
    policies: dict[str, tuple[dict[str, Any], str | None]] = {}  # further adapters: the same two


class TrainStep(Message, frozen=True):
    """One optimizer step; the weights become `version`. -> Stepped; Published follows"""

    batch: Batch
    version: int
    more: tuple[Batch, ...] = ()  # further minibatches, an update each, or of other policies
    max_rows: int | None = None  # of a microbatch, since larger ones exceeded a rank's memory
    publish: bool = True
    updates: bool = True  # False: only the loss of `batch` is computed, at `version`


class Stepped(Message, frozen=True):
    version: int
    metrics: dict[str, float]
    skipped: tuple[int, ...] = ()  # indices of minibatches with a non-finite loss or gradient
    reported: dict[int, np.ndarray] = {}  # of HostSums, by number in Microbatch.reported
    others: dict[str, "Stepped"] = {}  # of further policies in the same trainer, by name


class Published(Message, frozen=True):
    """Event, or reply to BorrowWeights: these weights are ready to be read, until a Release."""

    update: records.WeightUpdate


class BorrowWeights(Message, frozen=True):
    """Make the newest version readable for a late engine. -> Published; Done from ranks above 0"""

    policy: str = records.DEFAULT_POLICY


class Release(Message, frozen=True):
    """One reader of this version has finished. -> Done"""

    version: int
    policy: str = records.DEFAULT_POLICY


class SaveCheckpoint(Message, frozen=True):
    """Copy the state and write an atomic checkpoint directory. Part: Copied. -> Saved"""

    directory: str
    run_state: dict[str, Any]  # of the controller, such as the task cursor
    policy: str = records.DEFAULT_POLICY


class Copied(Part, frozen=True):
    """The state is copied: the next step does not affect the checkpoint."""


class Saved(Message, frozen=True):  # to the disk
    version: int
    complaint: str | None = None  # why older checkpoints could not be removed


# Scorers: reward functions, reward models and teachers


class StartScorer(Message, frozen=True):
    """Load the reward functions. -> Done"""

    functions: dict[str, str]  # name -> reference "module:name", or path of a file this run pickled


class ScoreGroup(Message, frozen=True):
    """Run one reward function on the episodes of a group. -> GroupScored"""

    function: str
    prompts: list[records.Prompt]
    completions: list[records.Prompt]  # as in TRL: text, or [assistant message] of a chat
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]


class GroupScored(Message, frozen=True):
    rewards: list[float | None]


class StartRewardModel(Message, frozen=True):
    """Load the reward model. -> Done"""

    settings: dict[str, Any]  # RewardModelSettings as plain data
    device: str  # of placement.models
    head: str  # "sequence" or "token"
    is_whole: bool  # it scores whole conversations instead of steps
    separator: str | None = None  # appended to each step
    kept_tokens: int = 0  # capacity of the cache of KV states of unfinished sequences


class StepReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole sequence for a reward model, cut into steps: tokens, or text for other tokenizers."""

    tokens: np.ndarray | None = None  # [L] int32
    ends: list[int] = []  # last token of each step
    prompt: records.Prompt = ""  # without tokens: the text of the prompt
    pieces: list[str] = []  # without tokens: the text of each step
    num_known: int = 0  # first steps, whose values are known already
    is_partial: bool = False  # further steps will follow


class ReadSteps(Message, frozen=True):
    """Compute the values of the steps. -> StepValues"""

    readings: list[StepReading]


class StepValues(Message, frozen=True):
    values: list[list[float]]  # by reading and step, without the known steps


class StartTeacher(Message, frozen=True):
    """Load the model of a teacher. -> Done"""

    config: dict[str, Any]  # RunConfig as plain data
    settings: dict[str, Any]  # LogprobModelSettings as plain data
    device: str  # of placement.models
    model_path: str
    num_known: int | None = None  # token ids it may report; None = those of the config's model
    history: dict[str, Any] | None = None  # of a self-teacher: lag, ema and every
    version: int = 0  # of the weights in model_path
    adapter_path: str | None = None  # in a LoRA run: the checkpoint whose adapter is applied
    saved_path: str = ""  # file in which it saves its weights, for a restart


# Environment worker


class StartEnvironment(Message, frozen=True):
    """Load the environment and the tokenizers of its models. -> Done"""

    config: dict[str, Any]  # RunConfig as plain data
    function: str | None = None  # as in StartScorer; None = as the config says


class PlayEpisode(Message, frozen=True):
    """Play one episode. Parts: TurnWanted, TurnDropped. -> EpisodePlayed"""

    key: int  # by which TurnSampled and CancelEpisode name it
    plan: Any  # EpisodePlan, which is plain data when it arrives


class TurnWanted(Part, frozen=True):
    """The environment wants a reply. TurnSampled follows."""

    prompt: np.ndarray  # [P] int32
    call: int  # number of the turn in its episode
    sampling: records.Sampling
    session: str  # unique within the group, see Request
    adapter: str | None = None
    model: str | None = None  # that samples it, whose tokens are trained only if it is a policy
    is_trained: bool = True
    pinned: bool = False
    partial: records.Completion | None = None  # tokens that the reply begins with
    routes_from: int = 0  # if routes are replayed, the reply has those from this position on


class TurnDropped(Part, frozen=True):
    """The environment no longer waits for the reply to this call."""

    call: int


class TurnSampled(Message, frozen=True):
    """Event for a worker: the reply to a TurnWanted, or why there is none."""

    key: int
    call: int
    completion: records.Completion | None
    error: str = ""


class CancelEpisode(Message, frozen=True):
    """Event for a worker: end this episode without a reply."""

    key: int


class EpisodePlayed(Message, frozen=True):
    episode: records.Episode
    recording: bytes | None  # as JSON


MESSAGES = [kind for kind in Message.__subclasses__() if kind is not Part]
MESSAGES += Part.__subclasses__()
