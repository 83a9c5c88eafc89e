"""A disk for tests that remembers what was synced, and loses the rest of it in a crash."""

import random
import shutil
from pathlib import Path

from millrace.journal.segments import FileSink


class CrashingDisk:
    def __init__(self, folder: Path, *, attic: Path) -> None:
        """`attic`: for copies of files, as a crash may bring back what was removed."""
        self.folder = folder
        self.syncs_left: int | None = None  # then it is dead; None = it lives
        self._attic = attic
        self._synced: dict[Path, int] = {}  # bytes that a crash cannot take
        attic.mkdir()

    def open(self, path: Path) -> "CrashingSink":
        for old in self.folder.glob("*.log"):
            shutil.copy(old, self._attic / old.name)
        self._synced[path] = 0
        return CrashingSink(path, self)

    def sync(self, path: Path) -> None:
        if self.syncs_left == 0:
            raise OSError("the machine has lost its power")
        if self.syncs_left is not None:
            self.syncs_left -= 1
        self._synced[path] = path.stat().st_size

    def crash(self, seed: int) -> None:
        """Cut files anywhere behind what was synced, change what was not, and bring removed files
        back, or not."""
        rng = random.Random(seed)
        for path, synced in self._synced.items():
            if path.exists():
                data = path.read_bytes()
                lost = bytearray(data[synced : rng.randint(synced, len(data))])
                if lost and rng.random() < 0.5:  # pages reach a disk in any order
                    lost[rng.randrange(len(lost))] ^= 1 + rng.randrange(255)
                path.write_bytes(data[:synced] + bytes(lost))
        for path in sorted(self._attic.iterdir()):
            if not (self.folder / path.name).exists() and rng.random() < 0.5:
                shutil.copy(path, self.folder / path.name)
        self._synced.clear()
        self.syncs_left = None


class CrashingSink(FileSink):
    def __init__(self, path: Path, disk: CrashingDisk) -> None:
        super().__init__(path)
        self._path = path
        self._disk = disk

    def sync(self) -> None:
        """Nothing has to reach a real disk here."""
        self._disk.sync(self._path)
