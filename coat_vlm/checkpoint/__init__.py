"""Checkpoints that continue exactly, at any number of ranks and any ZeRO stage."""
