"""Training of recipes on DeepSpeed, with bit-exact resume from checkpoints."""
