"""How many instructions a message takes, beside an earlier commit: ``make instructions``.

A request that becomes a little dearer in each of many commits shows in no benchmark: times on a shared machine differ by more.
The instructions that a processor carries out do not depend on who else uses the machine. valgrind's callgrind counts them, and
two runs differ by a tenth of a per cent. The commit that this one is compared with is named in ``budget.json``. It is built and
measured in the same run, with the same libraries. A case that takes 2 % more, and more than ``budget.json`` allows it with a
reason, fails.

What makes the counts repeat:

- The measured process starts and stops the counting itself (``meter.c``). So importing torch is not counted, and one process
  measures all cases.
- Its clock is its own, preloaded (``meter.c``): each look advances it by a microsecond, and yielding the processor returns at
  once. Otherwise those who poll, which is bounded in time, would look less often the more the machine has to do.
- Both ends are on one event loop, in one thread. Of ``threads.request``, which needs several, the part that takes least counts.
- Hashes have a fixed seed, addresses are the same in each run, no garbage is collected, and half as many messages come before
  those that count.

What they do not see: the kernel, cache misses, wake-ups. For these there are ratios of times (``ratios.py``), whose limits are
wide. How fast it is, :mod:`bench` says.
"""
