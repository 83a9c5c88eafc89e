"""Each preset shows in a run the design that it stands for."""

import contextlib
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from digits import TASKS
from held_group import digits_late, version_file
from preset_signatures import SIGNATURES, Signature
from recording_backend import Recording, RecordingBackend, read_recording
from tiny_model import make_tiny_model

import millrace as mr
from millrace.config import load_config
from millrace.core.records import Group
from millrace.monitoring.files.metrics import read_metrics, table
from millrace.monitoring.files.trace import read_trace

pytestmark = pytest.mark.slow

MAX_NEW_TOKENS = 64
GROUPS = 4  # per step
BACKEND = f"{Path(__file__).parents[1] / 'recording_backend.py'}:{RecordingBackend.__name__}"
FEWEST_STEPS, MOST_STEPS = 6, 40
UNLIMITED = 1000  # versions
LONG = 4  # versions; a staleness that a run without a limit must reach


class Watch(mr.Callback):
    """What a run trains on, and what it has written for its engines."""

    def __init__(self, folder: Path, design: Signature) -> None:
        self.folder, self.weights = folder, folder / "run" / "weights"
        self.design, self.has_outcome = design, False
        self.batches: list[list[int]] = [[]]
        self.mixed = self.whole = 0  # rollouts of several versions, and of one
        self.files: dict[str, set[str]] = {}  # tensors, by file name

    def on_group(self, group: Group) -> None:
        self.batches[-1].append(group.number)
        for rollout in group.rollouts:
            num_versions = len(set(rollout.versions[rollout.mask].tolist()))
            self.mixed += num_versions > 1
            self.whole += num_versions == 1

    def on_step(self, metrics) -> None:
        self.batches.append([])
        version_file(self.folder, metrics["version"]).touch()
        self.has_outcome |= has_outcome(self.design, metrics)
        if self.has_outcome and metrics["step"] >= FEWEST_STEPS and self.has_drained():
            raise mr.StopTraining

    def has_drained(self) -> bool:
        """Whether sequences have waited for others to finish, if the design wants it."""
        if self.design.interrupt != "drain":
            return True
        return read_recording(self.folder / "recording").draining > 0

    def look(self, has_ended: threading.Event) -> None:
        """Versions are removed as soon as all engines have read them."""
        while not has_ended.wait(0.002):
            with contextlib.suppress(FileNotFoundError):  # one is removed meanwhile
                for file in self.weights.glob("version_*/update.json"):
                    for one in file.parent.glob("*.safetensors"):
                        self.read(one)

    def read(self, file: Path) -> None:
        with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
            header = opened.read(int.from_bytes(opened.read(8), "little"))
            self.files.setdefault(file.name, set()).update(json.loads(header))


@pytest.mark.parametrize("name", SIGNATURES)
def test_run_shows_the_design(name: str, tmp_path: Path):
    design = SIGNATURES[name]
    held_until = version_to_hold_until(design)
    watch = Watch(tmp_path, design)
    has_ended = threading.Event()
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(has_ended.set)
        looking = pool.submit(watch.look, has_ended)
        mr.train(
            preset=name,
            model=str(make_tiny_model(tmp_path / "model")),
            run_dir=str(tmp_path / "run"),
            weights={"directory": str(watch.weights)},
            tasks=[{**task, "folder": str(tmp_path), "held_until": held_until} for task in TASKS],
            scorers=[digits_late],
            sampling={"max_new_tokens": MAX_NEW_TOKENS},
            rollout={"group_size": 4},
            trainer={"steps": MOST_STEPS, "groups_per_step": GROUPS},
            optimizer={"learning_rate": 1e-10},  # few weights change, so changes are small
            engine={
                "type": BACKEND,
                "max_sequences": 12,
                "options": {"recording": str(tmp_path / "recording")},
            },
            scoring={"workers": 1},
            cluster={"threads": 1},
            monitoring={"progress": "off"},
            callbacks=[watch],
        )
    looking.result()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    spans = read_trace(tmp_path / "run" / "trace.json")
    names = {span.name for span in spans if span.worker.startswith("engine")}
    check_interrupt(design, watch, read_recording(tmp_path / "recording"), names=names)
    check_staleness(design, rows)
    config = load_config(tmp_path / "run" / "config.toml")
    check_admission(design, rows, max_running=config.max_running_groups)
    check_order(design, watch)
    check_files(design, watch)


def version_to_hold_until(design: Signature) -> int:
    """So that the limit decides what happens to the first group; 0 = hold none."""
    if design.order == "in_order":  # all batches would wait for it
        return 0
    if design.limit == UNLIMITED:
        return LONG
    # The batch of version `limit` is the last that may contain it.
    return design.limit + {"wait": 0, "take": 1, "cancel": 2}[design.enforce]


def check_interrupt(design: Signature, watch: Watch, seen: Recording, *, names: set[str]) -> None:
    """What happens to running sequences when new weights arrive."""
    assert seen.updates >= 5
    assert (watch.mixed > 0) == (design.interrupt in ("swap", "abort", "save"))
    assert watch.whole > 0
    assert (seen.in_flight > 0) == (design.interrupt == "swap")
    assert (seen.paused > 0, "waiting for weights" in names) == (design.interrupt == "save",) * 2
    assert (seen.interrupted > 0, seen.resumed > 0) == (design.interrupt == "abort",) * 2
    assert (seen.held > 0) == (design.interrupt == "drain")
    assert ("drain" in names) == (design.interrupt == "drain")
    assert (seen.prefill_tokens > seen.prompt_tokens) == (design.kv == "recompute")


def has_outcome(design: Signature, metrics: Mapping[str, Any]) -> bool:
    """Whether the first group was trained, dropped or cancelled, as the design wants it."""
    if design.enforce == "cancel":
        return metrics.get("cancelled/scoring", 0) > 0
    if design.enforce == "take" and design.limit != UNLIMITED:
        return metrics.get("cancelled/waiting", 0) > 0
    return metrics["staleness/max"] >= (LONG if design.limit == UNLIMITED else design.limit)


def check_staleness(design: Signature, rows) -> None:
    """What becomes of a group that is too slow, and how stale trained tokens are."""
    assert any(has_outcome(design, row) for row in rows)
    assert max(row["staleness/max"] for row in rows) <= design.limit
    wasted, cancelled = table(rows[-1], "tokens/wasted"), table(rows[-1], "cancelled")
    if design.limit in (0, UNLIMITED):
        assert (wasted, cancelled) == ({}, {})
    elif design.enforce == "wait":
        assert "dropped" not in wasted
    elif design.enforce == "take":
        assert wasted["dropped"] > 0
        assert set(cancelled) == {"waiting"}, "only the buffer checks the limit"
    else:
        assert wasted["cancelled"] > 0


def check_admission(design: Signature, rows, *, max_running: int) -> None:
    """How many groups run, and how far they are ahead of the trainer."""
    assert max(row["groups/running"] for row in rows) <= max_running
    ahead = max(row["groups/running"] + row["buffer/depth"] for row in rows)
    gate = (design.limit + 1) * GROUPS
    if design.enforce != "take":
        assert ahead <= gate
    elif design.capacity == "unbounded":
        assert ahead > gate, "the staleness limit delays no group"


def check_order(design: Signature, watch: Watch) -> None:
    numbers = [number for batch in watch.batches for number in sorted(batch)]
    assert (numbers == sorted(numbers)) == (design.order == "in_order")


def check_files(design: Signature, watch: Watch) -> None:
    """Weights travel as files, whole, as changes or as adapters; or not as files."""
    if design.transport != "disk":
        assert watch.files == {}
        return
    assert ("delta.safetensors" in watch.files) == (design.payload == "delta")
    tensors = set.union(*watch.files.values()) - {"__metadata__"}
    is_adapter = {tensor for tensor in tensors if "lora" in tensor}
    assert is_adapter == (tensors if design.has_adapter else set())
