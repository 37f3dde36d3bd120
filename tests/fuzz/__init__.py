"""``make fuzz``: bytes from a peer that may be anything, against all code that reads them.

How to read it, in this order:

1. ``targets``: one function for each reader of foreign bytes. It takes any bytes, and raises if something happens that is
   not promised of such bytes. ``TARGETS`` names them, and ``SEEDS`` has honest inputs for each. Read it as a list of what a
   peer can do.
2. ``scripts``: inputs that are not one message but a play of several steps. Each byte chooses a step.
3. ``hostile_engine`` and ``hostile_worker``: scripts in which one side lies. It keeps to the rules until the script has it
   lie, so that a lie comes deep inside a working connection.
4. ``run`` (atheris searches for bytes that reach new Python code) and ``mutate`` (random damage, for the core with
   sanitizers).

How to use it::

    python -m tests.fuzz.run --seconds 60 TARGET    # a failing input is written to crash-...
    python -m tests.fuzz.run --help                 # lists the targets

``test_targets.py`` runs every target for a moment under hypothesis, in the ordinary tests. Nothing in a target is random: an
input that failed once fails again.
"""
