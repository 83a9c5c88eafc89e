"""Environments of other libraries, played as they are.

Each is an environment function that wraps what such a library has: classes for TRL's
environment_factory, Gymnasium environments, verifiers' environments.
"""
