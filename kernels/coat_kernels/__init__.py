"""The room for FP8 kernels in Triton; there are none yet (see kernels/README.md)."""
