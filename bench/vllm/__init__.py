"""``bench vllm``: real vLLM on the CPU, its tensors inline, by its own way through shared memory, and by shmring."""
