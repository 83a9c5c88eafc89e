"""Adapters for environments of other libraries: TRL's environment_factory and Gymnasium."""
