"""The journal of a run: what must survive a crash of anything, written ahead.

Promise: what was said to be durable is there after any crash, in order; what was not is there as a
beginning of it, or not at all. Nothing read from a journal is trusted before its checksum was.
Torch-free.
"""

from millrace.journal.absent import NoJournal
from millrace.journal.fates import TaskStatusFile
from millrace.journal.journal import Journal
from millrace.journal.ledger import Ledger
from millrace.journal.reading import JournalHistory, read_journal

__all__ = ["Journal", "JournalHistory", "Ledger", "NoJournal", "TaskStatusFile", "read_journal"]
