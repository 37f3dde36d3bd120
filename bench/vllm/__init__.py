"""``python -m bench vllm``: real vLLM on the CPU, its tensors sent inline, by its own way through shared memory, and by
shmring.

The servers of all ways run at once, in the environment that ``make test-vllm`` makes; the load goes to one after the other,
in an order that alternates. The model computes nearly nothing, so that what is measured is how its pictures get there.
"""
