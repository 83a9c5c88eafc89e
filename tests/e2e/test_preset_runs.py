"""Each preset shows in a run the design that it stands for."""

import contextlib
import json
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from digits import TASKS, share_of_digits
from tiny_model import make_tiny_model

import millrace as mr
from millrace.core.records import Group
from millrace.monitoring.files.metrics import read_metrics, table
from millrace.presets import preset_names, preset_text

pytestmark = pytest.mark.slow

MAX_NEW_TOKENS = 64
STEPS = 8


class Watch(mr.Callback):
    """What a run trains on, and what it has written for its engines."""

    def __init__(self, run_dir: Path) -> None:
        self.weights = run_dir / "weights"
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


@pytest.mark.parametrize("name", preset_names())
def test_run_shows_the_design(name: str, tmp_path: Path):
    design = tomllib.loads(preset_text(name))
    run_dir = tmp_path / "run"
    watch = Watch(run_dir)
    has_ended = threading.Event()
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(has_ended.set)
        looking = pool.submit(watch.look, has_ended)
        mr.train(
            preset=name,
            model=str(make_tiny_model(tmp_path / "model")),
            run_dir=str(run_dir),
            weights={"directory": str(run_dir / "weights")},
            tasks=TASKS,
            scorers=[share_of_digits],
            sampling={"max_new_tokens": MAX_NEW_TOKENS},
            rollout={"group_size": 4},
            trainer={"steps": STEPS, "groups_per_step": 4},
            optimizer={"learning_rate": 1e-10},  # few weights change, so changes are small
            engine={"max_sequences": 12},
            scoring={"workers": 1},
            cluster={"threads": 1},
            monitoring={"progress": "off"},
            callbacks=[watch],
        )
    looking.result()
    rows = read_metrics(run_dir / "metrics.jsonl")
    check_interrupt(design, watch)
    check_staleness(design, rows)
    check_dropped(design, rows)
    check_order(design, watch)
    check_files(design, watch)


def check_interrupt(design, watch: Watch) -> None:
    """Which versions a rollout mixes says where engines stop for new weights."""
    if design["weights"]["interrupt"] in ("drain", "barrier"):
        assert watch.mixed == 0
    else:
        assert watch.mixed > 0
    assert watch.whole > 0


def check_staleness(design, rows) -> None:
    limit = design["buffer"]["max_staleness"]
    largest = max(row["staleness/max"] for row in rows)
    assert largest <= limit
    assert (largest > 0) == (limit > 0)


def check_dropped(design, rows) -> None:
    """Generation that no limit holds back is rejected later; on-policy runs lose nothing."""
    wasted = table(rows[-1], "tokens/wasted")
    if design["buffer"]["capacity"] == "unbounded":
        assert wasted["dropped"] > 0
    if design["buffer"]["max_staleness"] == 0:
        assert wasted == {}


def check_order(design, watch: Watch) -> None:
    if design["buffer"]["order"] == "in_order":
        numbers = [number for batch in watch.batches for number in sorted(batch)]
        assert numbers == sorted(numbers)


def check_files(design, watch: Watch) -> None:
    """Weights travel as files, whole, as changes or as adapters; or not as files."""
    if design["weights"]["transport"] != "disk":
        assert watch.files == {}
        return
    assert ("delta.safetensors" in watch.files) == (design["weights"].get("payload") == "delta")
    tensors = set.union(*watch.files.values()) - {"__metadata__"}
    is_adapter = any("lora" in tensor for tensor in tensors)
    assert is_adapter == ("lora" in design)
    if is_adapter:
        assert all("lora" in tensor for tensor in tensors)
