"""``make simulate``: both books of ``shmring.core`` against each other, without sockets, processes or a clock.

Theory of operation: :mod:`.simulation` is the world: processes of frontends, lives of an engine, sockets between them that
keep their order and nothing else, and a slab of which only the owners are known. It says which actions can happen now and
lets one happen; what the ends decide they decide with the real :class:`~shmring.core.engine_book.EngineBook` and
:class:`~shmring.core.client_book.ClientBook`, and what ``Ring`` and ``Session`` add to them is written again in
:mod:`.engine` and :mod:`.frontend`, without asyncio. :mod:`.invariants` is what must hold after every action.

Nothing in here chooses. The walk (:mod:`.walk`) draws actions from a seed, the exploration (:mod:`.exploration`) takes
them all, and a hypothesis machine in the tests shrinks what it finds. A failure is a list of actions that replays it.
"""
