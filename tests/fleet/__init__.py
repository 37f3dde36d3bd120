"""What chaos and soak share: a fleet of processes, pipes to ask them, what they send, and what the kernel says of them."""
