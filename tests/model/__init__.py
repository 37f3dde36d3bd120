"""What the compiled books do, once more in plain Python: the specification of the core that a person can read.

How to read it, in this order:

1. ``blocks``: runs of blocks in a range, and where the next slot goes (best fit, lowest address first).
2. ``lending``: leases, recalls and windows: how the engine lends one memory to its frontends.
3. ``engine_book``: the engine's book. Read ``submit``, ``claim`` and ``release_slots`` first: they are the life of a
   request.
4. ``client_book``: a frontend's book of the slots in its leases.
5. ``kept_book`` and ``fan_out_book``: kept content, and which worker still reads which message.

A model has the same methods, effects and errors as the compiled book, and no speed. ``pairs`` runs the two side by side:
each event happens to both, and both must say the same. ``state`` says of each object which fields are compared. So a rule of
the books stands in two places on purpose, and a difference between them fails a test.

``message_ring.pml`` and ``acknowledgements.pml`` are models of another kind: the protocols of sleeping and waking, in
Promela, for spin. ``make verify`` has spin visit every order of loads and stores that x86 or ARM allows (``verify``). The
``.pyx`` files are ways into the compiled core that only tests have. ``fake_cuda`` and ``made_up_driver`` are a GPU made of
host memory.
"""
