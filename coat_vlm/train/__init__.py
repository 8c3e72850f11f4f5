"""Trains the stages of a recipe on DeepSpeed, with bit-exact resume from checkpoints.

Read first: ``run`` (opens a stage, builds or restores it, finishes it), ``loop`` (steps, saves,
validation), ``step`` (one optimizer step) and ``passes`` (forward, backward, update). ``checks``
runs before a model is loaded.
"""
