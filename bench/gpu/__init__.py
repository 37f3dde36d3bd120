"""``bench gpu``: from a slot to the GPU (:mod:`.copies`), and from one process to another one (:mod:`.handovers`)."""
