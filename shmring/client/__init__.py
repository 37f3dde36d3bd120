"""A frontend's end of the transport: the client, its session with one life of an engine, slots and requests."""
