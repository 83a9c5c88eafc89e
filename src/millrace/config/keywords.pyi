"""Written by `python tools/write_keywords.py` from the settings models."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

class ModelSettings(TypedDict, total=False):
    path: str
    """Hugging Face model directory, or the name of a model on the hub."""
    trust_remote_code: bool
    """Permission to run Python code from the model directory. Enable it only for models whose
    code you have read."""

class SamplingSettings(TypedDict, total=False):
    max_new_tokens: int
    """Maximum number of tokens in one completion."""
    temperature: float
    """Sampling temperature, above 0. Lower values favour likelier tokens."""
    top_k: int
    """Number of likeliest tokens to sample from; 0 = all tokens."""
    top_p: float
    """Probability mass to sample from, above 0 and up to 1: the likeliest tokens that reach it
    together. 1 = all tokens."""
    min_p: float
    """Minimum probability of a sampled token, as a share of the likeliest token's probability,
    from 0 to below 1. 0 = no minimum."""
    stop: str | Sequence[str]
    """Strings that end a completion, besides the end-of-sequence token, which always ends it."""

class ScoringSettings(TypedDict, total=False):
    workers: int
    """Number of processes that run reward functions. A hung or crashed one is replaced."""
    advantages: str | Mapping[str, Any]
    """Estimator that turns scores into advantages: "group" (minus the group's mean, over its
    standard deviation), "leave_one_out", "batch", "returns", "best_worst", "tree" (for
    environment.recipe), "gae" (with [critic], such as {type = "gae", gae_lambda = 0.95}), or
    "module:Name". "auto" is the one that belongs to the loss, mostly "group"; see
    docs/reference/losses.md."""
    penalty: str | Sequence[str | Mapping[str, Any]]
    """Length penalties, each a part of the score: "soft_overlong", "linear", "cosine", or
    "module:Name"; see docs/how-to/shape-training-data.md."""

class RolloutSettings(TypedDict, total=False):
    group_size: int
    """Number of episodes trained per task, at least 2. They are compared with each other."""
    oversample: int
    """Number of additional episodes started per task. rollout.selection chooses which
    rollout.group_size of them are trained."""
    longest_first: int
    """Number of queued requests that a request may skip if earlier episodes of its task were
    long. Starting long episodes early shortens the tail of a step. 0 = first come, first
    served."""
    selection: str | Mapping[str, Any]
    """Method that selects episodes if rollout.oversample starts additional ones: "roc" (failures
    at random, the cleanest successes), "first", "fastest" (those of an environment that
    finish first; the others are cancelled), or "module:Name"; see docs/how-to/shape-training-
    data.md."""
    filter: str | Sequence[str | Mapping[str, Any]]
    """Filters that drop or mask groups before training: "zero_variance", "overlong", or
    "module:Name"; see docs/how-to/shape-training-data.md."""
    max_running_groups: int | str
    """Maximum number of groups that are played or scored at the same time: a number, or "2
    batches" for twice trainer.groups_per_step."""

class ReplaySettings(TypedDict, total=False):
    share: float
    """Maximum share of a batch that is replayed, between 0 and 1."""
    max_staleness: int
    """Maximum staleness of a replayed group in versions, at least 2: a group can return in the
    second batch after its own at the earliest."""

class BufferSettings(TypedDict, total=False):
    capacity: int | str
    """Maximum number of groups that wait for the trainer, at least trainer.groups_per_step: a
    number, "2 batches" for twice trainer.groups_per_step, or "unbounded"."""
    max_staleness: int
    """Maximum staleness of a trained token: the trainer's version minus the version that sampled
    it. 0 = strictly on-policy."""
    staleness: str | Mapping[str, Any]
    """Tokens of a group to which buffer.max_staleness applies: "oldest" = every token, "mean" =
    their average, {type = "share", max_share = 0.1} = all but this share of them, from 0 to
    below 1. The key enforce says what happens to groups that run for too long: "wait" (the
    default) = a batch waits for them, "cancel" = they are cancelled and tried again, "take" =
    they are dropped from the buffer when a batch is taken; see docs/explanation/buffer.md."""
    order: str | Mapping[str, Any]
    """Order in which waiting groups are trained: "oldest", "freshest", "ready" (first come,
    first served), "in_order" (by task; a batch waits for earlier groups that still run),
    "difficulty" (half solved first), or "module:Name"."""
    replay: ReplaySettings | None
    """Replay of trained groups, such as {share = 0.25, max_staleness = 8}. By default every
    group is trained once."""

class MeshSettings(TypedDict, total=False):
    dp_replicate: int
    """Number of copies of the sharded model (HSDP). Each copy trains on its share of a batch."""
    dp_shard: int | Literal["auto"]
    """Number of ranks that FSDP shards weights, gradients and optimizer state over. "auto" is
    trainer.ranks / (dp_replicate * cp * tp); a single rank then does not use FSDP. With 1, a
    single rank uses it, over NCCL on a GPU, which is slower: a way to try both on one GPU."""
    cp: int
    """Number of ranks that share the rows of each microbatch (context parallelism), for
    sequences whose activations one GPU cannot hold. tp * cp must divide the number of key-
    value heads."""
    tp: int
    """Number of ranks that share each matrix product (tensor parallelism). tp * cp must divide
    the number of key-value heads."""
    ep: int
    """Number of ranks that share the experts of a mixture (expert parallelism). It must divide
    the number of experts, and dp_shard * cp."""

class TrainerSettings(TypedDict, total=False):
    steps: int
    """Number of training steps. Each step makes one version of the weights."""
    groups_per_step: int
    """Number of groups per step; multiplied by rollout.group_size, the number of episodes per
    step. In `millrace sft` it is the number of examples per step."""
    minibatches: int
    """Number of optimizer updates per step, each on its share of the groups."""
    epochs: int
    """Number of passes over the groups of a step, each in trainer.minibatches updates."""
    microbatch_tokens: int
    """Token budget of one rank in one forward and backward pass; the trainer.mesh.cp ranks that
    share a pass add theirs up. It bounds memory and does not change the result; a longer
    sequence gets a pass of its own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    """Data type of the computation; master weights and optimizer state stay float32. "auto" is
    bfloat16 on CUDA, which is several times as fast as float32, and float32 on a CPU. With
    "float16" the loss is scaled; see docs/performance.md."""
    gradient_checkpointing: bool
    """Recomputation of activations in the backward pass. It saves memory and costs about a third
    more computation."""
    compile: bool
    """Compilation of the layers with torch.compile: a slower start and faster steps. It needs
    g++, and Triton on a GPU."""
    replay_routes: bool
    """Replay of expert routes in a mixture of experts: the trainer sends each token to the
    experts that the engine chose; see docs/explanation/expert-routing.md."""
    router_aux_loss: float
    """Coefficient of the load-balancing loss of routers in a mixture of experts, such as 0.001.
    0 = no such loss. It needs trainer.replay_routes."""
    router_bias_rate: float
    """Change per step of the biases by which routers of DeepSeek-V3, GLM-4.5 and similar models
    balance their experts, such as 0.001. 0 = biases stay as they are. It needs
    trainer.replay_routes."""
    ranks: int | Literal["auto"]
    """Number of processes that train together, one per GPU (placement.trainer). "auto" is half
    of the GPUs of this host, or more if the model needs them."""
    remote: int
    """Number of ranks, the last ones of trainer.ranks, that other hosts bring with `millrace
    join --role trainer`; see docs/how-to/join-hosts.md."""
    mesh: MeshSettings
    """Division of the work among the ranks. dp_replicate * dp_shard * cp * tp must be
    trainer.ranks."""

class OptimizerSettings(TypedDict, total=False):
    type: str
    """Optimizer: "adamw", "muon" (Muon for the matrices of the layers, AdamW for the rest),
    "adamw8bit" (AdamW with 8-bit state, from torchao), or "module:Class" of a
    torch.optim.Optimizer, whose further arguments are keys of this table."""
    learning_rate: float | Literal["auto"]
    """Peak learning rate, above 0. "auto" is 1e-6 for all weights, where reinforcement learning
    needs small steps (`millrace sft`: 1e-5), and 1e-4 with [lora], whose low-rank factors
    start at zero and need larger ones."""
    schedule: Literal["constant", "linear", "cosine"]
    """Shape of the learning rate after optimizer.warmup_steps: it stays at its peak
    ("constant"), or falls until the end of trainer.steps, evenly ("linear") or along a cosine
    ("cosine")."""
    warmup_steps: int
    """Number of first steps in which the learning rate rises linearly to its peak."""
    min_lr_ratio: float
    """Learning rate at the end of a linear or cosine schedule, as a share of
    optimizer.learning_rate from 0 to 1."""
    betas: Sequence[float]
    """Decay rates of AdamW's first and second moment, each from 0 to below 1."""
    weight_decay: float
    """Weight decay of matrices, at least 0. Norms and biases have none."""
    max_grad_norm: float
    """Maximum norm of the gradient, above 0. Larger gradients are scaled down."""
    offload: bool
    """Optimizer state in host memory instead of GPU memory. Each update copies it to the GPU and
    back, a few hundred megabytes at a time, and gives the same result."""

class FidelitySettings(TypedDict, total=False):
    mode: Literal["fast", "exact"]
    """Agreement of engine and trainer logprobs for the same weights: "fast" = up to rounding,
    "exact" = bit for bit, at a cost in speed, and a step with a differing bit stops the run;
    see docs/explanation/exact.md."""

class CriticSettings(TypedDict, total=False):
    path: str | None
    """Model that the critic starts from, with the policy's vocabulary. By default model.path."""
    learning_rate: float
    """Learning rate of the critic, above 0 and constant."""
    warmup_steps: int
    """Number of first steps in which only the critic is trained."""
    value_clip: float | None
    """PPO value clip: maximum change of a value within a step, above 0. By default values are
    not clipped."""

class LoraSettings(TypedDict, total=False):
    rank: int
    """Rank of the adapter matrices."""
    alpha: float
    """Scale of the adapter, above 0: its product is multiplied by lora.alpha / lora.rank."""
    target_modules: str | Sequence[str]
    """Names of the layers to adapt, such as "q_proj" or "experts.down_proj". "all-linear" =
    every linear layer except the head, and in a mixture of experts the weights of all
    experts."""
    rslora: bool
    """Rank-stabilized scaling: lora.alpha / sqrt(lora.rank) instead of lora.alpha / lora.rank,
    so that a higher rank does not learn more slowly."""
    dora: bool
    """Weight-decomposed adaptation (DoRA): the length of each row of the updated weights is
    trained too."""
    apply: Literal["auto", "merged", "unmerged"]
    """Application in the engines: "merged" into the weights at each version, or "unmerged"
    beside them at each token. "auto" is merged, but unmerged with engine.adapters, with
    [policies], and on servers of vLLM or SGLang."""
    export_merged: bool
    """Export of the whole model, with the adapter merged into it, beside the last checkpoint."""
    quantization: Literal["nf4"] | None
    """Quantization of the frozen matrices beneath the adapter: "nf4" = 4 bits per weight in the
    trainer (QLoRA), and the same values in the engines. By default none; see docs/how-
    to/lora.md."""

class PolicySettings(TypedDict, total=False):
    model: str | None
    """Model that this policy starts from, as in model.path. By default that of the run."""
    optimizer: str | Mapping[str, Any]
    """Keys of [optimizer] that differ for this policy, such as {learning_rate = 1e-5}."""
    loss: str | Mapping[str, Any]
    """Objective of this policy, as in [loss]. By default that of the run."""
    lags: str | Sequence[int]
    """Earlier versions that roles may play against, as `agent.role(..., model="NAME", lag=4)`,
    each as the number of versions behind the newest. Needs [lora]."""

class EngineSettings(TypedDict, total=False):
    type: str
    """Engine backend: "embedded" (Millrace's own engine), "vllm" or "sglang" (servers of vLLM or
    SGLang; see docs/how-to/vllm.md), or "module:Class"."""
    options: str | Mapping[str, Any]
    """Options of the engine backend: those of engine.type = "embedded", "vllm" and "sglang" are
    listed in docs/reference/configuration.md, and those of a class are its fields."""
    count: int | Literal["auto"]
    """Number of engine processes on this host. "auto" is one for each GPU that the trainer and
    other models leave free, and 1 if they leave none."""
    max_count: int | None
    """Maximum number of engines while the run lasts: one is added when the trainer has waited
    for more than 30 % of the last 30 seconds, and removed again when a whole batch waits all
    the time. By default the run neither adds nor removes engines."""
    remote: int
    """Number of additional engines that other hosts bring with `millrace join`; see docs/how-
    to/join-hosts.md."""
    tp: int
    """Number of GPUs that hold one engine's model together, by tensor parallelism. Only vLLM and
    SGLang offer more than 1."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    """Data type of the engine's weights and KV cache. "auto" is bfloat16 on CUDA, which decodes
    at twice the speed of float32 in half the memory, and float32 on a CPU."""
    max_sequences: int
    """Maximum number of sequences that one engine decodes in a batch."""
    max_context: int | None
    """Maximum length of a sequence in tokens, prompt included. By default the limit of the
    model."""
    kv: Literal["keep", "recompute"]
    """Treatment of the KV cache when new weights arrive: "keep" continues with it, "recompute"
    prefills running sequences again under the new weights."""
    adapters: Mapping[str, str]
    """Additional LoRA adapters by name: PEFT folders that requests can select and that are never
    trained; see docs/how-to/lora.md."""

class WeightsSettings(TypedDict, total=False):
    transport: str
    """Transport of new weights to the engines: "shm" = shared memory of one host, "ipc" = GPU
    memory of one host, "collective" = one broadcast to all engines, "disk" = files in a
    shared directory, or "module:Class" for one of your own (docs/explanation/weights.md).
    "auto" is ipc between GPUs of one host, shm on one host otherwise, for servers and for
    engines that sleep, and collective with ranks or engines on other hosts."""
    payload: Literal["full", "delta"]
    """Content of an update: "full" = every value, "delta" = only the values that changed in
    engine.dtype since the last version."""
    interrupt: Literal["swap", "abort", "save", "drain", "barrier"]
    """Treatment of running sequences when new weights arrive: "swap" = they continue under the
    new weights, "abort" = they resume on any engine, "save" = they pause during the transfer,
    "drain" = they finish first, "barrier" = as drain, and generation and training alternate;
    see docs/explanation/weights.md."""
    probe: bool | None
    """Check of every swap: the engine scores a fixed passage, and is replaced if its logprobs
    are not those of the trainer. By default only engines of type "vllm" or "sglang" are
    checked."""
    directory: str | None
    """Directory for transport "disk" and for one of your own, under the same path on all hosts.
    By default weights/ in run_dir."""
    notify: str | Sequence[str]
    """URLs of external engines that receive {"version", "path"} by POST for every version, with
    transport "disk". The files of a version stay until all URLs have answered, for at most 60
    seconds by default (see supervision.hang_timeout_s)."""

class PlacementSettings(TypedDict, total=False):
    trainer: str | Sequence[str]
    """Device of the trainer and of its critic, or a list with one device for each of
    trainer.ranks on this host; other hosts choose the devices of theirs. "auto" or "cuda"
    alone gives each rank a GPU of its own; a GPU listed twice is shared."""
    engines: str | Sequence[str]
    """Device of the engines, or a list of devices that the engines, and after them those of
    evaluate.engines, use in turn. "auto" is the GPUs that nothing else uses, and those of the
    trainer if there are none."""
    models: Mapping[str, str | Sequence[str]]
    """Device or devices of each model besides the policy, by name: of environment.models, and of
    scorers that are models. By default "auto": a GPU of its own if there are enough."""

class CheckpointSettings(TypedDict, total=False):
    every_steps: int
    """Number of steps between checkpoints. 0 = only after the last step."""
    keep: int
    """Number of newest checkpoints that are kept."""
    grace_s: float
    """Time in seconds that a run has after SIGTERM, which schedulers send at preemption and
    before a time limit, to finish its step and write a checkpoint. The scheduler must wait
    longer before it kills the run; see docs/how-to/slurm.md and docs/how-to/kubernetes.md."""
    path: str | None
    """URL of a folder that finished checkpoints are also copied to, in any store that fsspec
    reaches, such as "s3://bucket/run", "gs://bucket/run" or "file:///mnt/run". Credentials
    come from the environment. `--resume` finds checkpoints there if run_dir has none or older
    ones."""

class JournalSettings(TypedDict, total=False):
    max_bytes: int
    """Size of the journal in bytes beyond which an extra checkpoint is made, so that the journal
    can shrink. 0 = no journal: `--resume` then samples the work since the newest checkpoint
    again (docs/explanation/reliability.md)."""
    partial_every_s: float
    """Interval in seconds at which the tokens of unfinished groups are saved. These groups
    resume from the saved tokens after a crash. With 0 they start again, as they do with
    weights.interrupt = "barrier", whose runs are reproducible."""

class EvaluateSettings(TypedDict, total=False):
    path: str | None
    """Path of the tasks: a JSONL file (one task per line: "prompt", a text or chat messages, and
    further columns), a Parquet file or a folder of them, a folder of a Hugging Face dataset,
    or "hub:NAME:SUBSET:SPLIT" with a dataset on the hub, such as
    "hub:openai/gsm8k:main:train"; see docs/how-to/tasks.md."""
    generator: str | Mapping[str, Any] | None
    """Source of tasks instead of a path: a function that returns a list of tasks, as
    "module:name" or "file.py:name", or a table such as {type = "reasoning_gym", dataset =
    "leg_counting"}; see docs/how-to/tasks.md."""
    columns: Mapping[str, str] | None
    """Names of the task's columns, each with the column of the path that it is read from, such
    as {prompt = "question", answer = "answer"}; other columns are not read. A list names
    columns besides "prompt" that keep their names. By default all columns are kept."""
    every_steps: int
    """Number of steps between evaluations. Held-out tasks are always evaluated before the first
    and after the last step; 0 = only then."""
    solved_at: float
    """Score at which an episode counts as solved."""
    max_tasks: int
    """Maximum number of held-out tasks that are evaluated: the first ones."""
    samples: int
    """Number of episodes per held-out task, for mean@k and pass@k."""
    temperature: float | None
    """Sampling temperature of evaluations; 0 = greedy. By default 0 for one sample, and
    sampling.temperature for several."""
    engines: int
    """Number of additional engine processes that only evaluate, always with exactly one version.
    0 = the engines of the rollouts evaluate, with the versions they have at the time."""

class MonitoringSettings(TypedDict, total=False):
    progress: Literal["auto", "live", "lines", "off"]
    """Progress display in the terminal: "live" = a view that is redrawn, "lines" = one line per
    step. "auto" is live in a terminal and lines elsewhere."""
    samples_per_step: int
    """Number of episodes written to rollouts/ at each step, with logprobs, advantages and
    versions of their tokens. 0 also turns off lifecycle/, the times of all groups."""
    record_episodes: int
    """Number of episodes of an environment written to episodes/ at each step, in full, for
    `millrace replay`."""

class TrackerSettings(TypedDict, total=False):
    type: str
    """Metrics tracker: "tensorboard", "trackio", "wandb", "mlflow" (each needs the extra of its
    name, such as millrace[wandb]), or "module:Class". Further arguments are keys of the
    table."""

class ClusterSettings(TypedDict, total=False):
    launcher: str | Mapping[str, Any]
    """Launcher of the trainer's ranks and of the engines: "local" (processes of this host),
    "ray" (a Ray cluster, whose address is the key address; see docs/how-to/ray.md), or
    "module:Class"."""
    address: str
    """Address at which the controller listens: "auto" (a private local socket) or
    "tcp://HOST:PORT", where HOST is a name or interface of this machine, or * for all. TCP is
    always encrypted, and only workers with the run's keys can connect."""
    advertise: str | None
    """Host name by which other hosts reach the controller. By default the HOST of
    cluster.address, and with * this machine's own name."""
    ticket: str | None
    """Path of the file that `millrace join` needs, written while the run lasts. It is a secret
    and must be outside run_dir."""
    start_timeout_s: float
    """Time limit in seconds for a worker to start and load its model. Other hosts have at least
    600 seconds to join."""
    threads: int | None
    """Number of CPU threads of each rank of the trainer and of each engine. By default they
    share the cores of their host evenly."""
    share_gpu: Literal["auto", "mps", "time_slices", "take_turns", "sleep"]
    """Sharing of a GPU by engines and trainer: "mps" = concurrent kernels through NVIDIA MPS,
    whose daemon the run starts and stops; "time_slices" = without MPS; "auto" = MPS where it
    is installed and several workers use a GPU; "take_turns" = as auto, and engines on GPUs of
    the trainer pause while it steps; "sleep" = as take_turns, and paused engines free the GPU
    memory of their weights and KV, which host memory holds meanwhile, with new versions; see
    docs/how-to/share-one-gpu.md."""

class SupervisionSettings(TypedDict, total=False):
    max_restarts: int
    """Maximum number of restarts of one worker within 10 minutes. One more failure ends the run.
    For scorers, environment workers, reward models and teachers, only failed starts count."""
    hang_timeout_s: float
    """Time limit in seconds for a worker with work to do to make progress. A worker that exceeds
    it writes its stacks to its log, is killed, and counts as dead. Until its first progress,
    the limit is at least cluster.start_timeout_s. The run ends after twice this time, and at
    least 600 seconds, without a completed step. Stalled weight updates, and those for which
    the disk is full, fail after 60 seconds, or after a fifth of this time if that is longer,
    but never later than this time."""

class TrainArguments(TypedDict, total=False):
    run_dir: str
    """Directory for everything that the run writes. A finished run is never overwritten."""
    seed: int
    """Seed of the task order and of all sampling."""
    model: str | ModelSettings
    """Model to train. A path alone stands for this table."""
    sampling: SamplingSettings
    """Sampling of completions."""
    scoring: ScoringSettings
    """Advantages, length penalties, and the processes that run reward functions."""
    rollout: RolloutSettings
    """Groups of episodes: their size, selection and filters."""
    buffer: BufferSettings
    """Buffer of groups that wait for the trainer, and the limit of their staleness."""
    trainer: TrainerSettings
    """Training steps: their number, batches, data type and memory."""
    optimizer: str | OptimizerSettings | Mapping[str, Any]
    """Optimizer, its learning rate, and gradient clipping."""
    loss: str | Mapping[str, Any]
    """Objective: the name of a built-in ("clipped", "grpo", "dapo", "gspo", ...) or
    "module:Name", alone or in a table with its own keys. With [critic] the default is "ppo";
    see docs/reference/losses.md."""
    fidelity: FidelitySettings
    """Agreement of engine and trainer logprobs."""
    critic: CriticSettings | None
    """Critic that estimates the value of each token, instead of comparing the episodes of a
    group; see docs/reference/losses.md."""
    lora: LoraSettings | None
    """Training of a LoRA adapter instead of all weights. It needs the extra millrace[lora]."""
    policies: Mapping[str, PolicySettings]
    """Policies of a run that trains several, by the role that each plays: `[policies.solver]` is
    what `agent.role("solver")` samples and trains. By default one policy plays all roles; see
    docs/how-to/several-policies.md."""
    engine: EngineSettings
    """Engines: the processes that generate."""
    weights: WeightsSettings
    """Weight updates from the trainer to the engines."""
    placement: PlacementSettings
    """Device of each worker: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"."""
    checkpoint: CheckpointSettings
    """Checkpoints: their interval and number."""
    journal: JournalSettings
    """Journal from which an interrupted run resumes."""
    evaluate: EvaluateSettings
    """Evaluation on held-out tasks."""
    monitoring: MonitoringSettings
    """Progress display, and records of episodes."""
    tracker: str | Sequence[str | TrackerSettings | Mapping[str, Any]]
    """Further destinations of the metrics, besides metrics.jsonl. A name alone stands for a
    table."""
    cluster: ClusterSettings
    """Workers: their connections, start and sharing of a GPU."""
    supervision: SupervisionSettings
    """Supervision of workers: detection of hung ones, and the limit of restarts."""
    tasks: Sequence[Any] | None
    """Tasks to train on: prompts, dicts or mr.Task."""
    eval_tasks: Sequence[Any] | None
    """Held-out tasks."""
    scorers: Sequence[Callable[..., Any] | str | Mapping[str, Any]] | Callable[..., Any] | str
    """Scorers, added to those of the settings."""
    environment: Callable[..., Any] | Mapping[str, Any] | None
    """Environment function, or its table."""
    callbacks: Sequence[Any]
    """Objects with hooks of mr.Callback."""
    preset: str | None
    """Name of a design, of `millrace presets`."""
