"""The engine process: requests, scheduling and the executors that run them."""
