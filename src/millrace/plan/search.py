"""The best split of GPUs: engines, trainer ranks and mesh, batch, and staleness limit.

Every split whose memory fits is estimated by its slower stage. The best one of each batch size and
staleness limit is simulated, and again after the simulation has corrected the estimate. Promise: a
run that cannot fit is refused in one sentence that says what is missing and what would fit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from millrace.config import RunConfig, load_config
from millrace.core.errors import ConfigError
from millrace.plan.memory import RUNTIME_BYTES, engine_fit, fitting, trainer_bytes, weights_bytes
from millrace.plan.model_costs import GIB, GPUS
from millrace.plan.planned_run import PlannedRun, Split
from millrace.plan.simulation import Prediction

_STALENESS = (1, 2, 4, 8)
_SMALL_GROUPS = 16  # per step, of the copies of a large run that are simulated in the search


def search(
    run: PlannedRun, *, batches: Sequence[int] = (), max_staleness: int | None = None
) -> tuple[Split, Prediction]:
    """The split with the most samples per second, and the freshest of those within 2 %."""
    limits = _limits(run.config, max_staleness)
    if not (fits := list(fitting(run))):
        raise ConfigError(_missing(run))
    found: list[tuple[Prediction, Split]] = []
    refusals: list[ConfigError] = []
    for groups_per_step, limit in product(batches or (run.config.trainer.groups_per_step,), limits):
        splits: list[Split] = []
        for sizes in fits:
            split = Split(**sizes, groups_per_step=groups_per_step, max_staleness=limit)
            try:
                run.with_split(split)
                splits.append(split)
            except ConfigError as error:
                refusals.append(error)
        found += _best(run, splits) if splits else ()
    if not found:
        raise ConfigError(f"No split of {run.num_gpus} x {run.gpu_name} can be run: {refusals[0]}")
    most = max(prediction.samples_per_s for prediction, _ in found)
    good = [pair for pair in found if pair[0].samples_per_s >= 0.98 * most]
    _, split = min(good, key=lambda pair: pair[0].staleness_mean)
    return split, run.predict(split)


def _limits(config: RunConfig, most: int | None) -> list[int]:
    """The staleness limits to try. `most`: None = that of the run if it is set."""
    if config.weights.interrupt == "barrier":
        return [0]
    if most is None:
        is_set = "max_staleness" in config.buffer.model_fields_set
        most = config.buffer.max_staleness if is_set else max(_STALENESS)
    return [*(limit for limit in _STALENESS if limit < most), most]


def _best(run: PlannedRun, splits: Sequence[Split]) -> Iterator[tuple[Prediction, Split]]:
    rates = {split: run.rates(split) for split in splits}
    first = max(splits, key=lambda split: min(rates[split]))
    found = run.predict(first, num_groups=_SMALL_GROUPS)
    yield found, first
    if found.trainer_busy < found.engine_busy:  # stragglers make engines slower than estimated
        share = found.samples_per_s / rates[first][0]
        second = max(splits, key=lambda split: min(share * rates[split][0], rates[split][1]))
        if second is not first:
            yield run.predict(second, num_groups=_SMALL_GROUPS), second


def _missing(run: PlannedRun) -> str:
    """Why no split fits, and what would: more GPUs, larger ones, or a smaller run."""
    fits: list[str] = []
    more = (2**power for power in range(1, 13) if 2**power > run.num_gpus)
    if count := next((n for n in more if any(fitting(replace(run, num_gpus=n)))), None):
        fits.append(f"{count} x {run.gpu_name}")
    larger = sorted(GPUS.items(), key=lambda item: item[1].memory_gb)
    larger = [item for item in larger if item[1].memory_gb > run.gpu.memory_gb]
    if name := next((n for n, gpu in larger if any(fitting(replace(run, gpu=gpu)))), None):
        fits.append(f"{run.num_gpus} x {name}")
    changes = {"[lora]": {"lora": {}}, "lora.apply = 'unmerged'": {"lora.apply": "unmerged"}}
    changed = ((text, load_config(run.config, overrides=own)) for text, own in changes.items())
    if text := next((t for t, c in changed if any(fitting(replace(run, config=c)))), None):
        fits.append(text)
    has = f"one {run.gpu_name} has {run.memory_bytes / GIB:.0f} GiB"
    if run.num_gpus < 2:
        what = "one GPU generates and another one trains"
    elif engine_fit(run, 1) is None and run.config.engine.type == "embedded":
        needed = weights_bytes(run) + RUNTIME_BYTES + run.shape.kv_bytes * run.lengths.longest
        parts = "weights, new weights and one sequence"
        what = f"an engine needs {needed / GIB:.0f} GiB for {parts}, and {has}"
        fits.append("engine.type = 'vllm', whose engines may span GPUs,")
    else:
        needed = trainer_bytes(run, ranks=run.num_gpus - 1)
        what = f"each of {run.num_gpus - 1} ranks needs {needed / GIB:.0f} GiB, and {has}"
    hint = f"{' or '.join(fits)} would fit" if fits else "train a smaller model"
    return f"{run.num_gpus} x {run.gpu_name} cannot hold this run: {what}; {hint}."
