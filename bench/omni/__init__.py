"""``bench omni``: what vLLM-Omni's stages pass on, by its own connector and by shmring's, with its own code around them."""
