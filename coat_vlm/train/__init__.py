"""Training: recipes on DeepSpeed, with checkpoints that continue exactly."""
