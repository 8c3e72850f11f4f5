"""Precision studies: what FP8 costs in training loss, and where."""
