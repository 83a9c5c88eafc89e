"""What became of each number that is not open any more, one by one: four bytes for each, beside the
segments.

    fates.bin   uint32 by number: 0 = open, or not known; the version whose step trained it; or
                REASON + k: it was closed for the reason in line k of fates.txt

Promise: what the newest snapshot of the journal counts as closed is told apart here, on the disk;
what was closed since is in the records behind it. Writing the same again changes nothing.
Called from one thread at a time; reading is safe while others write.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from millrace.core import files as storage
from millrace.journal.ledger import TRAINED, Ledger, TaskStatus

REASON = 2**31
_ENTRY = np.dtype("<u4")


class TaskStatusFile:
    def __init__(self, folder: Path) -> None:
        self._entries = folder / "fates.bin"
        self._reasons = folder / "fates.txt"

    def begin(self, ledger: Ledger) -> None:
        """Go on where the books stand; what a crash took back from them is open again."""
        self._entries.touch(mode=0o600)
        os.truncate(self._entries, _ENTRY.itemsize * ledger.next_number)
        self._put((number, 0) for number in ledger.open)
        self.write(ledger.take_closed())

    def write(self, closed: Mapping[int, TaskStatus]) -> None:
        """Returns when that is on the disk."""
        if not closed:
            return
        codes = self._codes(fate.what for fate in closed.values())
        self._put(
            (number, fate.version if fate.what == TRAINED else REASON + codes[fate.what])
            for number, fate in closed.items()
        )
        storage.sync(self._entries)

    def read(self, ledger: Ledger) -> dict[str, list[int]]:
        """Numbers by what became of them, with what the books know beyond what is written here."""
        entries = np.zeros(ledger.next_number, _ENTRY)
        if self._entries.exists():
            written = np.fromfile(self._entries, _ENTRY)[: len(entries)]
            entries[: len(written)] = written
        entries[list(ledger.open | ledger.closed.keys())] = 0
        found = {TRAINED: np.flatnonzero((entries > 0) & (entries < REASON)).tolist()}
        for code, reason in enumerate(self._known()):
            found[reason] = np.flatnonzero(entries == REASON + code).tolist()
        for number, fate in ledger.closed.items():
            found.setdefault(fate.what, []).append(number)
        return {what: sorted(numbers) for what, numbers in found.items() if numbers}

    def _put(self, entries: Iterable[tuple[int, int]]) -> None:
        with self._entries.open("r+b") as file:
            for number, entry in entries:
                data = entry.to_bytes(_ENTRY.itemsize, "little")
                os.pwrite(file.fileno(), data, _ENTRY.itemsize * number)

    def _codes(self, reasons: Iterable[str]) -> dict[str, int]:
        """Those that are new are on the disk before anything refers to them."""
        known = self._known()
        new = sorted(set(reasons) - {TRAINED, *known})
        if new:
            with self._reasons.open("a") as file:
                file.writelines(f"{reason}\n" for reason in new)
            storage.sync(self._reasons)
        return {reason: code for code, reason in enumerate([*known, *new])}

    def _known(self) -> list[str]:
        return self._reasons.read_text().splitlines() if self._reasons.exists() else []
