"""Recorded episodes: write them to files, read them, and run them again without an engine."""
