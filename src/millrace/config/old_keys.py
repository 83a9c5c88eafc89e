"""Keys of earlier versions: the new key, or why there is none. Torch-free."""

# An old key and the new one, or two tables and the keys that moved from one to the other. * stands
# for a name or a position.
_RENAMED = """
trainer optimizer learning_rate schedule warmup_steps betas weight_decay max_grad_norm
engine engine.options block_tokens prefill_tokens compile prefix_cache kv_bytes
environment.models.* environment.models.NAME.options block_tokens prefill_tokens compile
environment.models.* environment.models.NAME.options prefix_cache kv_bytes
trainer cluster threads
engine cluster threads
environment.models.* cluster threads
tasks.function tasks.generator
tasks.source.*.function tasks.source.NAME.generator
evaluate.function evaluate.generator
trainer.min_learning_rate_share optimizer.min_lr_ratio
trainer.device placement.trainer
engine.device placement.engines
environment.models.*.device placement.models.NAME
scorers.*.device placement.models.NAME
placement.scorers placement.models
engine.round_steps engine.options.decode_steps
environment.models.*.round_steps environment.models.NAME.options.decode_steps
engine.num_blocks engine.options.kv_bytes
environment.models.*.num_blocks environment.models.NAME.options.kv_bytes
"""

_CONSTANTS = """
trainer.logprob_chunk critic.loss_weight environment.tool_result_chars weights.bucket_bytes
rollout.max_failure_share rollout.max_filtered_share tasks.explore_share tasks.target_solve_rate
evaluate.score_timeout_s cluster.stop_timeout_s cluster.heartbeat_timeout_s journal.segment_bytes
journal.commit_interval_s journal.fsync scorers.*.backoff_s scorers.*.breaker_failures
scorers.*.breaker_s supervision.stall_warning_s supervision.window_s supervision.backoff_s
supervision.report_s supervision.step_timeout_s supervision.swap_timeout_s
supervision.save_timeout_s
"""


def _renamed() -> dict[str, str]:
    renamed: dict[str, str] = {}
    for old, new, *keys in map(str.split, _RENAMED.strip().splitlines()):
        renamed |= {f"{old}.{key}": f"{new}.{key}" for key in keys} or {old: new}
    return {old: f"it is now {new!r}; rename it" for old, new in renamed.items()}


OLD_KEYS: dict[str, str] = {
    **_renamed(),
    **dict.fromkeys(_CONSTANTS.split(), "it is a constant now; remove it"),
    "scorer": "its tables are now [[scorers]] (in Python scorers=[...]); rename them",
    "watch": "its table is now [monitoring]; rename it, and replace tensorboard = true by a table"
    ' [[tracker]] with type = "tensorboard"',
    **{
        f"{table}.{key}": replacement
        for table in ("tasks", "tasks.source.*", "evaluate")
        for key, replacement in {
            "subset": "it is now part of the path; write path = 'hub:NAME:SUBSET'",
            "prompt": "it is now part of columns; write columns = {prompt = 'question', answer ="
            " 'answer'} with all columns to keep",
            "split": "it is now part of the path; write path = 'hub:NAME:SUBSET:SPLIT', or the"
            " split's folder",
        }.items()
    },
    "tasks.source.*.name": "it is now the name of the table; write [tasks.source.NAME]",
    "buffer.max_stale_share": "it is now part of 'buffer.staleness'; write staleness = {type ="
    " 'share', max_share = ...}",
    "buffer.replay.capacity": "all trained groups within buffer.replay.max_staleness can be"
    " replayed; remove it",
    **{
        f"critic.{old}": f"it is now a key of scoring.advantages; write advantages = {{type ="
        f" 'gae', {key} = ...}} in [scoring]"
        for key, names in {
            "gamma": ("discount", "gamma"),
            "gae_lambda": ("decay", "gae_lambda"),
            "normalize": ("normalize",),
        }.items()
        for old in names
    },
    "environment.models.*.tool_format": "it follows from the model's chat template; remove it",
    "journal.enabled": "journal.max_bytes = 0 turns the journal off; remove it",
    "weights.address": "the trainer listens at the host of cluster.advertise or cluster.address;"
    " remove it",
    "placement.evaluators": "engines that only evaluate use the devices of placement.engines after"
    " the other engines; add theirs to that list",
    "cluster.join_timeout_s": "it is cluster.start_timeout_s, and at least 600; remove it",
    "cluster.stall_timeout_s": "it is twice supervision.hang_timeout_s, and at least 600; remove"
    " it",
    "cluster.mps": "it is now 'cluster.share_gpu', with 'mps' for 'on' and 'time_slices' for 'off';"
    " rename it",
    "cluster.take_turns": "write share_gpu = 'take_turns' in [cluster] instead",
    "environment.mcp.*.name": "messages name a server by its url or command; remove it",
    "scorers.*.priority": "calls are served in the order of arrival; remove it",
}


def old_key(path: list[str]) -> str | None:
    """What became of this key of an earlier version; None if there never was one."""
    patterns = [path, *([*path[:at], "*", *path[at + 1 :]] for at in range(1, len(path)))]
    found = (OLD_KEYS.get(".".join(pattern)) for pattern in patterns)
    return next((replacement for replacement in found if replacement is not None), None)
