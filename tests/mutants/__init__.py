"""Would the checks notice if the core were wrong? ``make mutants`` puts faults into it, one at a time, and looks who notices.

The faults are of every kind that people make, and in every compiled file. All of them are in one build, each behind a switch
(:mod:`tests.switches`). Each has the check that must notice it, which is as narrow as can be, or a reason why nobody need
notice. The tables are beside this, by subject.
"""

from __future__ import annotations
