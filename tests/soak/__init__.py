"""``make soak``: an engine and its frontends under load for as long as one likes, and whether anything grows meanwhile.

See :mod:`tests.soak.plan` for what they do, :mod:`tests.soak.driver` for how it is watched, and :mod:`tests.soak.verdict` for
what must not grow and why the limits are what they are.
"""
