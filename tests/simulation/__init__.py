"""``make simulate``: an engine, its frontends and its workers against each other, without processes or a clock.

This is the shortest way to learn what shmring does: all that can happen to it is a list of actions here.

How to read it, in this order:

1. :mod:`.scenario`: how large a world is (frontends, slots, requests), and ``Kind``, the list of all actions that can
   happen.
2. :mod:`.simulation`: the world. It says which actions can happen now, and lets one of them happen.
3. :mod:`.invariants`: what must hold after every action. Read it as the promises of the product.
4. :mod:`.engine`, :mod:`.frontend` and :mod:`.worker`: the product's own code, with handlers and callers that are made up.
5. :mod:`.walk` draws actions from a seed; :mod:`.exploration` takes all of them, breadth first, in small scenarios.

What is real and what is made up: the ring, the sessions and the workers' part are the product's. They run in event loops of
which the simulation turns each callback (:mod:`.loop`). Made up is what they stand on (:mod:`.around`): connections, pidfds,
threads that copy. :mod:`.wire` is between the sides: it keeps the order of records and nothing else. Memory is not simulated
byte by byte: only the owners of blocks are known. :mod:`.midst` has things happen inside of calls. :mod:`.fan_out_truth` is
what workers were really sent, beside a model of the engine's book of them.

How to use it::

    python -m tests.simulation --steps 100000 --seed 7      # a random walk
    python -m tests.simulation --exhaustive                 # every state of small scenarios
    python -m tests.simulation --replay FILE                # a failure that --json FILE wrote

A failure is a list of actions that replays it, shortened as far as possible (:mod:`.failure`); a crash is one, too
(:mod:`.crash`). Read the list from its end: the last action shows what broke, those before it show how it came to that.
"""
