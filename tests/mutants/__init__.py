"""Would the checks notice if the code were wrong? ``make mutants`` puts faults into it, one at a time, and looks who notices.

The faults are of every kind that people make: in every compiled file, and in the Python of the transport, the plug-ins and the
server. Those that are compiled are in one build, each behind a switch (:mod:`tests.switches`); those in Python need no build.
Each has the check that must notice it, which is as narrow as can be, or a reason why nobody need notice. The tables are beside
this, by subject.
"""

from __future__ import annotations
