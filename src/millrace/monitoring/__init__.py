"""What a user sees of a run: directory, metrics, trace, progress, plots, summary. Torch-free."""
