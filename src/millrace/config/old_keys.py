"""Keys of earlier versions: the new key, or why there is none. Torch-free."""

# By dotted key; * stands for a name or a position.
_RENAMED = {
    "tasks.function": "tasks.generator",
    "tasks.source.*.function": "tasks.source.NAME.generator",
    "evaluate.function": "evaluate.generator",
    "trainer.learning_rate": "optimizer.learning_rate",
    "trainer.schedule": "optimizer.schedule",
    "trainer.warmup_steps": "optimizer.warmup_steps",
    "trainer.betas": "optimizer.betas",
    "trainer.weight_decay": "optimizer.weight_decay",
    "trainer.max_grad_norm": "optimizer.max_grad_norm",
    "trainer.min_learning_rate_share": "optimizer.min_lr_ratio",
    "trainer.device": "placement.trainer",
    "engine.device": "placement.engines",
    "environment.models.*.device": "placement.models.NAME",
    "trainer.threads": "cluster.threads",
    "engine.threads": "cluster.threads",
    "environment.models.*.threads": "cluster.threads",
    "scorers.*.device": "placement.models.NAME",
    "placement.scorers": "placement.models",
    "engine.block_tokens": "engine.options.block_tokens",
    "engine.round_steps": "engine.options.decode_steps",
    "engine.prefill_tokens": "engine.options.prefill_tokens",
    "engine.prefix_cache": "engine.options.prefix_cache",
    "engine.compile": "engine.options.compile",
    "engine.num_blocks": "engine.options.kv_bytes",
    "engine.kv_bytes": "engine.options.kv_bytes",
    "environment.models.*.num_blocks": "environment.models.NAME.options.kv_bytes",
    **{
        f"environment.models.*.{key}": f"environment.models.NAME.options.{key}"
        for key in ("block_tokens", "prefill_tokens", "compile", "prefix_cache", "kv_bytes")
    },
    "environment.models.*.round_steps": "environment.models.NAME.options.decode_steps",
}

_CONSTANTS = (
    "trainer.logprob_chunk",
    "critic.loss_weight",
    "environment.tool_result_chars",
    "weights.bucket_bytes",
    "rollout.max_failure_share",
    "rollout.max_filtered_share",
    "tasks.explore_share",
    "tasks.target_solve_rate",
    "evaluate.score_timeout_s",
    "cluster.stop_timeout_s",
    "cluster.heartbeat_timeout_s",
    "journal.segment_bytes",
    "journal.commit_interval_s",
    "journal.fsync",
    "scorers.*.backoff_s",
    "scorers.*.breaker_failures",
    "scorers.*.breaker_s",
    "supervision.stall_warning_s",
    "supervision.window_s",
    "supervision.backoff_s",
    "supervision.report_s",
    "supervision.step_timeout_s",
    "supervision.swap_timeout_s",
    "supervision.save_timeout_s",
)

OLD_KEYS: dict[str, str] = {
    **{old: f"it is now {new!r}; rename it" for old, new in _RENAMED.items()},
    **dict.fromkeys(_CONSTANTS, "it is a constant now; remove it"),
    "scorer": "its tables are now [[scorers]] (in Python scorers=[...]); rename them",
    "watch": (
        "its table is now [monitoring]; rename it, and replace tensorboard = true by a table"
        ' [[tracker]] with type = "tensorboard"'
    ),
    **dict.fromkeys(
        ("tasks.subset", "tasks.source.*.subset", "evaluate.subset"),
        "it is now part of the path; write path = 'hub:NAME:SUBSET'",
    ),
    **dict.fromkeys(
        ("tasks.prompt", "tasks.source.*.prompt", "evaluate.prompt"),
        "it is now part of columns; write columns = {prompt = 'question', answer = 'answer'} with"
        " all columns to keep",
    ),
    **dict.fromkeys(
        ("tasks.split", "tasks.source.*.split", "evaluate.split"),
        "it is now part of the path; write path = 'hub:NAME:SUBSET:SPLIT', or the split's folder",
    ),
    "tasks.source.*.name": "it is now the name of the table; write [tasks.source.NAME]",
    "buffer.max_stale_share": (
        "it is now part of 'buffer.staleness'; write staleness = {type = 'share', max_share = ...}"
    ),
    "buffer.replay.capacity": (
        "all trained groups within buffer.replay.max_staleness can be replayed; remove it"
    ),
    **{
        f"critic.{old}": (
            f"it is now a key of scoring.advantages; write advantages = {{type = 'gae', {key} ="
            " ...} in [scoring]"
        )
        for old, key in {
            "discount": "gamma",
            "gamma": "gamma",
            "decay": "gae_lambda",
            "gae_lambda": "gae_lambda",
            "normalize": "normalize",
        }.items()
    },
    "environment.models.*.tool_format": "it follows from the model's chat template; remove it",
    "journal.enabled": "journal.max_bytes = 0 turns the journal off; remove it",
    "weights.address": (
        "the trainer listens at the host of cluster.advertise or cluster.address; remove it"
    ),
    "placement.evaluators": (
        "engines that only evaluate use the devices of placement.engines after the other engines;"
        " add theirs to that list"
    ),
    "cluster.join_timeout_s": "it is cluster.start_timeout_s, and at least 600; remove it",
    "cluster.stall_timeout_s": (
        "it is twice supervision.hang_timeout_s, and at least 600; remove it"
    ),
    "cluster.mps": (
        "it is now 'cluster.share_gpu', with 'mps' for 'on' and 'time_slices' for 'off'; rename it"
    ),
    "cluster.take_turns": "write share_gpu = 'take_turns' in [cluster] instead",
    "environment.mcp.*.name": "messages name a server by its url or command; remove it",
    "scorers.*.priority": "calls are served in the order of arrival; remove it",
}


def old_key(path: list[str]) -> str | None:
    """What became of this key of an earlier version; None if there never was one."""
    patterns = [path, *([*path[:at], "*", *path[at + 1 :]] for at in range(1, len(path)))]
    found = (OLD_KEYS.get(".".join(pattern)) for pattern in patterns)
    return next((replacement for replacement in found if replacement is not None), None)
