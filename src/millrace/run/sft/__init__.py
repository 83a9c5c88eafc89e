"""Supervised fine-tuning with the trainer of a run: `millrace sft`, `mr.sft`."""
