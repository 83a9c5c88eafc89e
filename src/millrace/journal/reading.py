"""What a journal says about the past of its run. Only reads: the run may still be going on.

The newest Snapshot and all that follows it make the books; groups may lie before it. Damage at the
very end, of bytes that nobody was told to be durable, is what a crash leaves: it is left out, and
said. Other damage is refused, unless it lies where nothing is needed any more.
"""

from dataclasses import dataclass, field
from pathlib import Path

from millrace.core.errors import JournalError
from millrace.journal.encoding import decode_record
from millrace.journal.framing import SEGMENT_MAGIC, Framed, is_torn, scan
from millrace.journal.ledger import Ledger
from millrace.journal.parts import PartialGroups
from millrace.journal.records import (
    AdmittedRecord,
    AnyRecord,
    CarriedRecord,
    LedgerSnapshot,
    ProgressedRecord,
)
from millrace.journal.segments import RecordLocation, Segments

_TRIES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Torn:
    """The end of a segment that a crash cut short."""

    segment: int
    end: int  # what lies behind it is left out
    num_bytes: int


@dataclass(kw_only=True, slots=True)
class JournalHistory:
    """The books at the end of the journal, and where the groups lie that they need."""

    ledger: Ledger
    places: dict[int, RecordLocation] = field(
        default_factory=dict[int, RecordLocation]
    )  # by number
    parts: PartialGroups = field(default_factory=PartialGroups)  # of groups in flight
    position: int = 0  # of the last record
    sizes: dict[int, int] = field(default_factory=dict[int, int])  # bytes by segment; whole ones
    torn: Torn | None = None


def read_journal(folder: Path) -> JournalHistory | None:
    """None where there is no journal, or a crash came before its first record was durable."""
    for _ in range(_TRIES):
        try:
            return _Reading(Segments(folder)).run()
        except FileNotFoundError:  # the run goes on, and has just given up a segment
            continue
    raise _refusal(folder, "its files come and go")


class _Reading:
    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._ledger: Ledger | None = None
        self._places: dict[int, RecordLocation] = {}
        self._parts = PartialGroups()
        self._position = 0
        self._sizes: dict[int, int] = {}
        self._damage: str | None = None  # that a later snapshot has not made good yet
        self._torn: Torn | None = None

    def run(self) -> JournalHistory | None:
        ids = self._segments.ids()
        for segment in ids:
            self._read(segment, is_last=segment == ids[-1])
        if self._damage is not None:
            raise _refusal(self._segments.folder, self._damage)
        if self._ledger is None and self._position == 0:
            return None
        if self._ledger is None:
            raise _refusal(self._segments.folder, "its beginning is missing")
        self._check_groups(self._ledger)
        live = self._ledger.live
        self._parts.keep_needed(self._ledger)
        return JournalHistory(
            ledger=self._ledger,
            places={number: place for number, place in self._places.items() if number in live},
            parts=self._parts,
            position=self._position,
            sizes=self._sizes,
            torn=self._torn,
        )

    def _read(self, segment: int, *, is_last: bool) -> None:
        data = self._segments.read(segment)
        self._sizes[segment] = len(data)
        end = 0 if bytes(data[: len(SEGMENT_MAGIC)]) != SEGMENT_MAGIC else len(SEGMENT_MAGIC)
        try:
            for found in scan(data):
                self._take(found, segment=segment)
                end = found.end
        except JournalError as error:  # what a checksum vouches for is not what we write
            self._damaged(segment, f"at byte {end}: {error}")
            return
        if end == len(data):
            return
        if is_last and is_torn(data, end):
            self._torn = Torn(segment=segment, end=end, num_bytes=len(data) - end)
            self._sizes[segment] = end
        else:
            self._damaged(segment, f"is damaged at byte {end}")

    def _take(self, found: Framed, *, segment: int) -> None:
        entry = decode_record(found.payload)
        record = entry.record
        if isinstance(record, LedgerSnapshot):
            self._ledger, self._damage = Ledger(record), None
        elif self._ledger is not None:
            self._continue(record, found, segment=segment)
        self._position = max(self._position, found.position)
        length = len(entry.content)
        place = RecordLocation(segment=segment, offset=found.end - length, length=length)
        if isinstance(record, AdmittedRecord | CarriedRecord):
            self._places[record.number] = place
        elif isinstance(record, ProgressedRecord):
            self._parts.add(record, place)

    def _continue(self, record: AnyRecord, found: Framed, *, segment: int) -> None:
        assert self._ledger is not None
        if found.position != self._position + 1:
            self._damaged(
                segment,
                f"goes on with record {found.position} after {self._position}, so that a part is"
                " missing",
            )
        elif self._damage is None:
            self._ledger.fold(record, position=found.position)

    def _damaged(self, segment: int, how: str) -> None:
        self._damage = self._damage or f"{self._segments.path(segment).name} {how}"

    def _check_groups(self, ledger: Ledger) -> None:
        missing = sorted(ledger.live - self._places.keys())
        if missing:
            raise _refusal(self._segments.folder, f"the group of number {missing[0]} is missing")


def _refusal(folder: Path, damage: str) -> JournalError:
    return JournalError(
        f"The journal in {str(folder)!r} cannot be trusted: {damage}; bring it back from a copy, or"
        f" remove the folder to go on from the newest checkpoint without what was done since."
    )
