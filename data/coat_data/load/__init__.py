"""Samples to batches: dataset, encoder, collation, loader."""
