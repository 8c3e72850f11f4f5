"""Writes model folders for other programs: transformers, LLaVA, peft, compressed-tensors."""
