"""Measurements behind `millrace bench NAME`: each prints a table, and writes JSON on request."""
