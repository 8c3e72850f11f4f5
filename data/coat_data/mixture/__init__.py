"""Order of the samples: selection, mixture, sampler, packing."""
