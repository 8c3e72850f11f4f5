"""Measurements that compare precisions; results stand in docs/results.md."""
