"""Model folders that other programs read: transformers, LLaVA, VILA, peft, compressed-tensors."""
