"""Which sample stands where: selection, mixture, sampler, packing."""
