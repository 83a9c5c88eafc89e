"""The journal of a run: a SQLite database of everything that a crash must not lose.

Promise: what was reported as durable is there after any crash, in order; a change that was not is
there as a whole or not at all. No payload is used before its checksum was verified. Torch-free.
"""

from millrace.journal.journal import Journal, NoJournal
from millrace.journal.ledger import Ledger
from millrace.journal.reading import JournalHistory, read_journal

__all__ = ["Journal", "JournalHistory", "Ledger", "NoJournal", "read_journal"]
