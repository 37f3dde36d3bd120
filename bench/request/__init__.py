"""``bench request``: requests with payloads, each with its reply, many in flight, by shmring and by its peers."""
