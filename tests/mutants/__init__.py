"""Would the checks notice if the code were wrong? This puts faults into it, one at a time, and looks who notices.

Some take away a guard, on which a guarantee of docs/guarantees.md depends: ``make guards`` tries these. ``make
mutants`` tries the others, which are of every kind that people make: in every compiled file, and in the Python of the
transport, the plug-ins and the server. What is compiled is built once, each fault behind a switch; those in Python need no
build. Each has the check that must notice it, which is as narrow as can be, or a reason why nobody need notice. The table is
one, in parts by subject (``*.faults``), and each file has one place in it.
"""

from __future__ import annotations
