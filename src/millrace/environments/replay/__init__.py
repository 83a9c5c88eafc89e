"""Recorded episodes: written to files, read again, played again without an engine.

| module | owns |
|---|---|
| `schema.py` | what a recording holds, as JSON |
| `recorder.py` | an episode that was played -> its recording |
| `episodes.py` | a recording -> its episode, as it was |
| `answers.py` | what a recording answers to an environment that asks again |
| `rerun.py` | the environment, played again on what is recorded |
| `edits.py` | recordings with another tool result or reward |
| `files.py` | lines of recordings |
| `command.py` | `millrace replay` |
"""
