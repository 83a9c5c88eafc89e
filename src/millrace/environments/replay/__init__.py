"""Recorded episodes: write them to files, read them, and run them again without an engine.

| module | owns |
|---|---|
| `schema.py` | the contents of a recording, as JSON |
| `recorder.py` | finished episodes to recordings and back |
| `answers.py` | recorded replies and tool results for an environment that runs again |
| `rerun.py` | runs an environment on a recording |
| `files.py` | reads, writes and edits files of recordings |
| `command.py` | `millrace replay` |
"""
