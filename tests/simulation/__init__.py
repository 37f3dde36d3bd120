"""``make simulate``: an engine, its frontends and its workers against each other, without processes or a clock.

Theory of operation: :mod:`.simulation` is the world: processes of frontends and of workers, lives of an engine, sockets between
them that keep their order and nothing else, and a slab of which only the owners are known. It says which actions can happen now
and lets one happen. The ends are the product's: a ring (:mod:`.engine`), its sessions (:mod:`.frontend`) and its workers' end
(:mod:`.fan_out`) run in loops of which the simulation turns each callback (:mod:`.loop`). What it makes up is what they stand
on (:mod:`.around`: connections, pidfds, threads that copy), and who uses them: handlers and callers. :mod:`.midst` has things
happen within calls. :mod:`.invariants` is what must hold after every action; :mod:`.fan_out_truth` is what workers were really
sent, and a model of the engine's book of them.

Nothing in here chooses. The walk (:mod:`.walk`) draws actions from a seed, and the exploration (:mod:`.exploration`) takes
them all. A failure is a list of actions that replays it; a crash is one, too (:mod:`.crash`).
"""
