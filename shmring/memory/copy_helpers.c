/* Long copies are shared with helper threads: one core alone moves a fraction of what a server's memory can.
 *
 * Theory of operation. A copy is cut into pieces. Its caller wakes helpers, and copies piece after piece itself; whoever is free takes the
 * next one. So the caller never waits for a helper that has not come, and where all cores are busy it copies everything alone. When no
 * piece is left it waits for those that helpers are at. There is one copy at a time that has helpers; others are made as if there
 * were none.
 *
 * A helper sleeps between copies. Waking one takes a few microseconds, and tens in a virtual machine whose core sleeps, which is why
 * short copies have none. Helpers that came too late four times in a row are woken for every 32nd copy only.
 *
 * Memory order. A helper enters (counts itself in) before it looks whether the copy is open, and the caller closes it before it looks
 * whether somebody is in: both sequentially consistent, so at least one of them sees the other. The caller waits for whoever is in, and who
 * does not find the copy open touches nothing. The caller's load of the count that a helper has left (acquire and release) makes what that
 * helper wrote the caller's own, and so part of what the caller publishes afterwards. Streaming stores are fenced by whoever makes them.
 *
 * A forked child has no helpers and starts its own: they are threads of the process that made them.
 *
 * Of the C library only what every Linux since 2014 has: a wheel runs where all its symbols are, and those of threads moved with glibc 2.32 and
 * 2.34. So threads are started by Python, which has its own way to, and who has the helpers is an atomic flag: nobody waits for it.
 *
 * Source: that an object store should copy with several threads is Plasma's (Apache Arrow, later Ray: memcopy_threads).
 */
#define _GNU_SOURCE
#include <Python.h>

#include "copy_helpers.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PIECE ((size_t)256 << 10) /* some 20 us: what a caller may have to wait for at the end */
#define MOST_HELPERS 3 /* four cores fill the memory bandwidth that one process should take of a server */
#define MOST_IN_VAIN 4
#define RETRY 32
#define PATIENCE 500 /* looks, some 20 us, before the caller sleeps */

static struct {
    copy_function how;
    char *to;
    const char *from;
    size_t nbytes;
    atomic_size_t next;  /* where the next piece starts */
    atomic_uint opened;  /* how many copies were; helpers sleep on it */
    atomic_uint is_open;
    atomic_uint inside;  /* helpers that may be at a piece; the caller sleeps on it */
    atomic_ulong helped; /* pieces, by helpers */
} shared;

static atomic_int is_taken = 0; /* whether somebody has the helpers, and what follows */
static int helpers = 0;
static int most_helpers = MOST_HELPERS;
static int in_vain = 0;
static int passed_over = 0;

static void sleep_on(atomic_uint *at, unsigned seen) { syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0); }

static void wake(atomic_uint *at, int most) { syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, most, NULL, NULL, 0); }

/* Between two looks at what another core is about to change. */
static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static unsigned long copy_pieces(void)
{
    unsigned long pieces = 0;
    size_t start;
    while ((start = atomic_fetch_add_explicit(&shared.next, PIECE, memory_order_relaxed)) < shared.nbytes) {
        size_t left = shared.nbytes - start;
        shared.how(shared.to + start, shared.from + start, left < PIECE ? left : PIECE);
        pieces++;
    }
    return pieces;
}

static int take_helpers(void) { return !atomic_exchange_explicit(&is_taken, 1, memory_order_acquire); }

static void leave_helpers(void) { atomic_store_explicit(&is_taken, 0, memory_order_release); }

static void help(void *unused)
{
    unsigned seen = 0;
    (void)unused;
    for (;;) {
        unsigned opened = atomic_load(&shared.opened);
        if (opened == seen) {
            sleep_on(&shared.opened, seen);
            continue;
        }
        seen = opened;
        atomic_fetch_add(&shared.inside, 1);
        if (atomic_load(&shared.is_open))
            atomic_fetch_add_explicit(&shared.helped, copy_pieces(), memory_order_relaxed);
        if (atomic_fetch_sub(&shared.inside, 1) == 1)
            wake(&shared.inside, 1);
    }
}

static void forget_helpers(void)
{
    helpers = in_vain = passed_over = 0;
    atomic_store(&shared.inside, 0);
    atomic_store(&shared.is_open, 0);
    leave_helpers();
}

/* How many of those that are wanted have a core of their own, now: cores may have become fewer. */
static int with_own_core(int wanted)
{
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof(cores), &cores))
        return 0;
    return wanted < CPU_COUNT(&cores) ? wanted : CPU_COUNT(&cores) - 1;
}

/* Starts helpers, if there are fewer than wanted, and returns how many can help. */
static int start_helpers(int wanted)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}; /* are of who causes them */
    sigset_t all, before;
    wanted = with_own_core(wanted);
    if (helpers >= wanted)
        return wanted;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
        sigdelset(&all, faults[i]);
    sigprocmask(SIG_SETMASK, &all, &before); /* of this thread, on Linux; signals are for the threads of whoever uses this */
    while (helpers < wanted && PyThread_start_new_thread(help, NULL) != PYTHREAD_INVALID_THREAD_ID)
        helpers++;
    sigprocmask(SIG_SETMASK, &before, NULL);
    return helpers;
}

static int is_worth_waking(void) { return in_vain < MOST_IN_VAIN || ++passed_over % RETRY == 0; }

static void copy_shared(copy_function how, char *to, const char *from, size_t nbytes, int helping)
{
    unsigned long helped = atomic_load_explicit(&shared.helped, memory_order_relaxed);
    unsigned inside;
    shared.how = how;
    shared.to = to;
    shared.from = from;
    shared.nbytes = nbytes;
    atomic_store_explicit(&shared.next, 0, memory_order_relaxed);
    atomic_store(&shared.is_open, 1);
    atomic_fetch_add(&shared.opened, 1);
    wake(&shared.opened, helping);
    copy_pieces();
    atomic_store(&shared.is_open, 0);
    for (int look = 0; (inside = atomic_load(&shared.inside)) != 0; look++) {
        if (look < PATIENCE)
            relax();
        else
            sleep_on(&shared.inside, inside);
    }
    in_vain = atomic_load_explicit(&shared.helped, memory_order_relaxed) == helped ? in_vain + 1 : 0;
}

void copy_with_helpers(copy_function how, char *to, const char *from, size_t nbytes)
{
    int helping = 0;
    if (nbytes < LONG_COPY || !take_helpers()) {
        how(to, from, nbytes);
        return;
    }
    if (is_worth_waking()) {
        helping = nbytes / LONG_COPY < (size_t)most_helpers ? (int)(nbytes / LONG_COPY) : most_helpers;
        helping = start_helpers(helping);
    }
    if (helping)
        copy_shared(how, to, from, nbytes, helping);
    else
        how(to, from, nbytes);
    leave_helpers();
}

int prepare_helpers(void) { return pthread_atfork(NULL, NULL, forget_helpers); }

int limit_helpers(int most)
{
    while (!take_helpers())
        sched_yield();
    most_helpers = most < 0 ? 0 : most > MOST_HELPERS ? MOST_HELPERS : most;
    in_vain = passed_over = 0;
    leave_helpers();
    return with_own_core(most_helpers);
}

unsigned long pieces_helped(void) { return atomic_load(&shared.helped); }
