"""`millrace plan`: reads the options, plans, and writes the files."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from millrace.config import load_config, parse_override
from millrace.plan.calibrate import (
    calibrate,
    calibration_file,
    predict,
    predicted_mib,
    read_calibration,
)
from millrace.plan.lengths import read_lengths
from millrace.plan.model_costs import ModelShape, gpu_named
from millrace.plan.report import FORMATS, lines, write_plan
from millrace.plan.search import PlannedRun, search


def plan(args: argparse.Namespace) -> None:
    overrides = {key: parse_override(key, value) for key, value in args.settings.items()}
    config = load_config(args.config, overrides=overrides)
    shape = ModelShape.read(config.model.path)
    lengths = read_lengths(args.lengths, max_new_tokens=config.sampling.max_new_tokens)
    settings: Mapping[str, Any] = {}
    if args.gpus is None:
        file = calibration_file(args.calibration)
        if args.calibrate:
            calibrate(args.config, settings=args.settings, file=file)
        found = read_calibration(file)
        prediction = predict(found, config, shape, lengths)
        memory = {found.device: int(predicted_mib(found, config, shape, lengths) * 2**20)}
        split = {"engines": config.engine.num_local, "ranks": config.trainer.num_ranks}
        notes = []
    else:
        run = PlannedRun(
            config=config,
            shape=shape,
            lengths=lengths,
            gpu=gpu_named(args.gpu),
            gpu_name=args.gpu.lower(),
            num_gpus=args.gpus,
        )
        chosen, prediction = search(
            run, batches=args.groups_per_step, max_staleness=args.max_staleness
        )
        memory = {"engine": chosen.engine_bytes, "trainer": chosen.trainer_bytes}
        settings, split = run.settings(chosen), asdict(chosen)
        notes = ["efficiencies are those that Millrace reached on an H200"]
    hours = (args.gpus or 1) / prediction.samples_per_s / 3.6  # of one GPU
    result = {
        **{key: getattr(prediction, key) for key in FORMATS},
        "gpu_hours_per_1000_samples": hours,
        "cost_per_1000_samples": None if args.price is None else hours * args.price,
        "memory_bytes_per_device": memory,
        "split": split,
        "notes": [*notes, *([f"lengths are {lengths.source}"] if lengths.source else [])],
    }
    written = write_plan(args.config, settings, result, prediction)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(lines(result)))
    print(f"wrote {', '.join(path.name for path in written)} to {written[0].resolve().parent}")
