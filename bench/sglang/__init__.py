"""``bench sglang``: SGLang's multimodal tensors, by its own way and by shmring, with SGLang's own code around them."""
