"""What it takes to hand a message to several workers, beside what would be taken instead: ``python -m bench fan-out``.

The command (:mod:`.command`) starts a *host* (:mod:`.host`) for each environment that is needed: its own, and vLLM's for the
MessageQueue. A host imports once, and forks an engine for each *cell*; the engine forks the workers. So all peers are
measured by the same code (:mod:`.measuring`), in processes that have nothing but their own peer open. How each of them sends
and receives is in :mod:`.ways`.

What a host runs is imported in vLLM's environment, too: it takes nothing that is not installed there.
"""
