"""Would the checks notice if the core were wrong? ``make mutants`` puts faults into it, one at a time, and looks who notices.

Faults are of every kind that people make, in every compiled file. All of them are in one build of a copy of the sources, each behind a
switch (:mod:`.switches`); an environment variable says which one is there. Each has the check that must notice it, which is as narrow as can
be. The tables are beside this, by subject: :data:`FAULTS` are all of them.
"""

from __future__ import annotations
