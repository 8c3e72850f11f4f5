"""Keeps a run consistent: its lock, signals, and the lifetime of its processes."""
