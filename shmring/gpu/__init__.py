"""Everything that knows CUDA: pinning, copies to a GPU, and the device slab."""
