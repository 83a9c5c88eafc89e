"""Where the progress of groups in flight lies: part by part, until the group is complete.

Promise: of each number the parts of its newest try are known, and handed out as far as none is
missing. What a group needs no more is forgotten, and its bytes count for nothing.
Called from one thread at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace.journal.ledger import Ledger
from millrace.journal.records import ProgressedRecord
from millrace.journal.segments import RecordLocation


@dataclass(kw_only=True, slots=True)
class _Try:
    tries: int  # before this one
    places: dict[int, RecordLocation] = field(default_factory=dict[int, RecordLocation])  # by part


class PartialGroups:
    def __init__(self) -> None:
        self._by_number: dict[int, _Try] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def add(self, record: ProgressedRecord, place: RecordLocation) -> None:
        """Also of a part that has moved."""
        newest = self._by_number.get(record.number)
        if newest is None or newest.tries < record.tries:
            newest = self._by_number[record.number] = _Try(tries=record.tries)
        if newest.tries == record.tries:
            newest.places[record.part] = place

    def of(self, number: int, *, tries: int) -> list[RecordLocation]:
        """In order."""
        known = self._by_number.get(number)
        if known is None or known.tries != tries:
            return []
        places: list[RecordLocation] = []
        while (place := known.places.get(len(places))) is not None:
            places.append(place)
        return places

    def drop(self, number: int) -> None:
        self._by_number.pop(number, None)

    def keep_needed(self, ledger: Ledger) -> None:
        """Forget what belongs to no try that goes on."""
        playing = ledger.playing
        self._by_number = {
            number: known
            for number, known in self._by_number.items()
            if number in playing and known.tries == ledger.tries.get(number, 0)
        }

    def items(self) -> Iterator[tuple[ProgressedRecord, RecordLocation]]:
        for number, known in self._by_number.items():
            for part, place in known.places.items():
                yield ProgressedRecord(number=number, tries=known.tries, part=part), place

    def holds(self, record: ProgressedRecord, place: RecordLocation) -> bool:
        """False if it is no longer needed, or lies elsewhere by now."""
        known = self._by_number.get(record.number)
        if known is None or known.tries != record.tries:
            return False
        return known.places.get(record.part) is place
