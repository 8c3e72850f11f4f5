"""Fixtures of the end-to-end tests."""

from shared_run import small_run, tiny_data

__all__ = ["small_run", "tiny_data"]
