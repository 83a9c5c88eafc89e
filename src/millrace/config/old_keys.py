"""Keys of earlier versions: the new key, or why there is none. Torch-free."""

_CONSTANT = "it is a constant now; remove it"


def _moved(new: str) -> str:
    return f"it is now {new!r}; rename it"


# By dotted key; * stands for a name or a position.
OLD_KEYS: dict[str, str] = {
    **{
        f"trainer.{key}": _moved(f"optimizer.{key}")
        for key in (
            "learning_rate",
            "schedule",
            "warmup_steps",
            "betas",
            "weight_decay",
            "max_grad_norm",
        )
    },
    "trainer.min_learning_rate_share": _moved("optimizer.min_lr_ratio"),
    "trainer.device": _moved("placement.trainer"),
    "engine.device": _moved("placement.engines"),
    "environment.models.*.device": _moved("placement.models.NAME"),
    "scorers.*.device": _moved("placement.scorers.NAME"),
    "scorer": "its tables are now [[scorers]] (in Python scorers=[...]); rename them",
    "watch": (
        "its table is now [monitoring]; rename it, and replace tensorboard = true by a table"
        ' [[tracker]] with type = "tensorboard"'
    ),
    "critic.discount": _moved("critic.gamma"),
    "critic.decay": _moved("critic.gae_lambda"),
    **dict.fromkeys(
        (
            "trainer.logprob_chunk",
            "critic.loss_weight",
            *(
                f"environment.models.*.{key}"
                for key in ("block_tokens", "round_steps", "prefill_tokens")
            ),
            *(f"environment.models.*.{key}" for key in ("compile", "prefix_cache")),
            "weights.bucket_bytes",
            "rollout.max_filtered_share",
            "tasks.explore_share",
            "evaluate.score_timeout_s",
            "cluster.stop_timeout_s",
            "supervision.stall_warning_s",
            "journal.segment_bytes",
            "journal.commit_interval_s",
        ),
        _CONSTANT,
    ),
    "engine.block_tokens": _moved("engine.options.block_tokens"),
    "engine.round_steps": _moved("engine.options.round_steps"),
    "engine.num_blocks": _moved("engine.kv_bytes"),
    "environment.models.*.num_blocks": _moved("environment.models.NAME.kv_bytes"),
    "supervision.swap_timeout_s": _moved("supervision.step_timeout_s"),
    "supervision.save_timeout_s": _moved("supervision.step_timeout_s"),
}


def old_key(path: list[str]) -> str | None:
    """What became of this key of an earlier version; None if there never was one."""
    if (found := OLD_KEYS.get(".".join(path))) is not None:
        return found
    for position in range(1, len(path)):
        pattern = ".".join([*path[:position], "*", *path[position + 1 :]])
        if (found := OLD_KEYS.get(pattern)) is not None:
            return found
    return None
