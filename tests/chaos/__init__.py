"""``make chaos``: an engine and several frontends under load, and everything that can happen to a process.

Every tensor carries a number and a checksum, every request is accounted for, and after every phase the books must balance
to the last byte. See :mod:`tests.chaos.plan` for what happens, :mod:`tests.chaos.driver` for how, and
:mod:`tests.chaos.account` for what is counted.
"""
