"""Each call of the asyncio interface, interrupted at each of its suspensions, on both loops. A part of ``make simulate``.

The simulator (:mod:`tests.simulation`) interrupts parts of the product between any two callbacks. Here it is the whole product,
with its sockets, threads and loops: a ring with a worker, and two clients. A call is interrupted the k-th time that it
suspends, for each k; afterwards all books must be clean, and the next call must work.

How to use it::

    python -m tests.suspensions                 # all of it, minutes
    python -m tests.suspensions --call keep     # one call
"""
