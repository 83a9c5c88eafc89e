"""Everything a user sees of a run: run directory, metrics, trace, progress, plots. Torch-free."""
