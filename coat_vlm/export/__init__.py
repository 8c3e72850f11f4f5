"""Writes model folders for other programs: transformers, LLaVA, VILA, peft, compressed-tensors."""
