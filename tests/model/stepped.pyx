"""Runs a call, and has something else happen between two of its instructions, as another thread or process could do just then.

Theory of operation. A flag of the processor has it trap behind each instruction. The signal's handler counts those that lie in the code
of one compiled module, and behind the chosen one it does what the *intruder* does. So each moment at which somebody could come between
is tried, one after the other (:func:`at_each_step`), on one core as well as on many, and nothing is left to luck. Not seen is what a
processor does in another order than that of its instructions; ``tests/core/test_protocols.py`` is about that. For x86 only.

An intruder is C that neither allocates nor needs the interpreter's lock; or it has another thread do something, where the call does
not hold that lock.
"""

import itertools

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport uintptr_t
from posix.unistd cimport read, write

from shmring.core.compiled import Region, TensorMaker

cdef extern from "dlpack.h" nogil:
    ctypedef struct DLManagedTensor:
        void (*deleter)(DLManagedTensor*) noexcept nogil

cdef extern from *:
    """
    #include <signal.h>
    #include <stdint.h>
    #include <ucontext.h>

    typedef struct Intrusion {
        void (*act)(struct Intrusion *);
        int needs_lock; /* what it does waits for whoever needs the interpreter's lock */
        void *view;
        int asking, answered;
    } Intrusion;

    static Intrusion *intrusion;
    static uintptr_t text_start, text_end;
    static long steps_left;
    static volatile int has_acted;

    #ifdef __x86_64__
    #define IS_STEPPED 1
    #define TRAPS 0x100
    /* The stack below it may be in use: the red zone. */
    #define CHANGE_FLAGS(change) __asm__ volatile( \\
        "lea -128(%%rsp), %%rsp; pushfq; " change ", (%%rsp); popfq; lea 128(%%rsp), %%rsp" ::: "memory", "cc")

    static void on_trap(int number, siginfo_t *info, void *context) {
        greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
        uintptr_t at = (uintptr_t)registers[REG_RIP];
        (void)number, (void)info;
        if (at < text_start || at >= text_end || (intrusion->needs_lock && PyGILState_Check()) || steps_left--)
            return;
        registers[REG_EFL] &= ~TRAPS;
        intrusion->act(intrusion);
        has_acted = 1;
    }

    static PyObject *call_in_steps(PyObject *call) {
        struct sigaction stepping = {0}, before;
        PyObject *result;
        stepping.sa_sigaction = on_trap;
        stepping.sa_flags = SA_SIGINFO;
        sigaction(SIGTRAP, &stepping, &before);
        CHANGE_FLAGS("orq $0x100");
        result = PyObject_CallNoArgs(call);
        CHANGE_FLAGS("andq $~0x100");
        sigaction(SIGTRAP, &before, NULL);
        return result;
    }
    #else
    #define IS_STEPPED 0
    static PyObject *call_in_steps(PyObject *call) { return PyObject_CallNoArgs(call); }
    #endif
    """
    struct Intrusion:
        void (*act)(Intrusion*) noexcept nogil
        bint needs_lock
        void* view
        int asking
        int answered
    bint IS_STEPPED_ "IS_STEPPED"
    Intrusion* intrusion
    uintptr_t text_start
    uintptr_t text_end
    long steps_left
    bint has_acted
    object call_in_steps(object call)

#: Whether this processor can do that.
IS_STEPPED = bool(IS_STEPPED_)


cdef class Intruder:
    """What happens in the middle of a call; once."""

    cdef Intrusion _intrusion


cdef class LastView(Intruder):
    """Somebody drops a view of a region, on another thread and without the interpreter's lock.

    The view is what torch would get, and is dropped as torch does it.

    Args:
        region: that it is a view of.
    """

    def __init__(self, region: Region) -> None:
        capsule = TensorMaker(_capsule_itself).tensor(region, 0, (1,), 1, 8)
        self._intrusion.act = _drop
        self._intrusion.view = PyCapsule_GetPointer(capsule, "dltensor")

    def __dealloc__(self) -> None:
        if self._intrusion.view != NULL:
            _drop(&self._intrusion)


def _capsule_itself(capsule: object) -> object:
    return capsule


cdef void _drop(Intrusion* dropping) noexcept nogil:
    cdef DLManagedTensor* view = <DLManagedTensor*>dropping.view
    dropping.view = NULL
    view.deleter(view)


cdef class OtherThread(Intruder):
    """Another thread of Python does something, while the call does not hold the interpreter's lock.

    Args:
        asking: a descriptor to which a byte is written for it to begin.
        answered: a descriptor from which a byte is read when it has.
    """

    def __init__(self, asking: int, answered: int) -> None:
        self._intrusion.act = _ask
        self._intrusion.needs_lock = True
        self._intrusion.asking, self._intrusion.answered = asking, answered


cdef void _ask(Intrusion* other) noexcept nogil:
    cdef char answer = 0
    write(other.asking, &answer, 1)
    read(other.answered, &answer, 1)


def at_each_step(module, begin) -> int:
    """Tries each moment; returns how many there are.

    Args:
        module: in whose code somebody comes between; compiled.
        begin: ``begin()`` returns a call without arguments, an intruder, and what is given the call's result afterwards, and checks it.
    """
    global text_start, text_end, intrusion, steps_left, has_acted
    cdef Intruder intruder
    text_start, text_end = _text_of(module.__file__)
    for at in itertools.count():
        call, intruder, check = begin()
        intrusion, steps_left, has_acted = &intruder._intrusion, at, False
        result = call_in_steps(call)
        if not has_acted:
            return at
        check(result)


def _text_of(path: str) -> tuple[int, int]:
    """Where the code of a file is mapped."""
    with open("/proc/self/maps") as maps:
        [place] = [line.split()[0] for line in maps if line.rstrip().endswith(path) and " r-xp " in line]
    start, end = place.split("-")
    return int(start, 16), int(end, 16)
