"""``make simulate``: an engine, its frontends and its workers against each other, without processes or a clock.

Theory of operation: :mod:`.simulation` is the world: processes of frontends and of workers, lives of an engine, sockets between
them that keep their order and nothing else, and a slab of which only the owners are known. It says which actions can happen now
and lets one happen. What the ends decide they decide with the real books and ends of the core. What ``Ring`` and ``Session``
add to them is written again in :mod:`.engine` and :mod:`.frontend`, without asyncio. The shells of workers (:mod:`.fan_out`)
and of kept content (:mod:`.kept`) are the real ones, in a loop of which the simulation turns each callback (:mod:`.loop`).
:mod:`.invariants` is what must hold after every action; :mod:`.fan_out_truth` is what workers were really sent, and the model
of the engine's book of them.

Nothing in here chooses. The walk (:mod:`.walk`) draws actions from a seed, and the exploration (:mod:`.exploration`) takes
them all. A failure is a list of actions that replays it.
"""
