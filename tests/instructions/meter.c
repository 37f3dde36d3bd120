/* Preloaded into the measured process: starts and stops the counting, and keeps a clock that advances by a microsecond with each look. */

#define _GNU_SOURCE
#include <semaphore.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <valgrind/callgrind.h>

static int64_t now_ns; /* 0: the clock is the kernel's */

int clock_gettime(clockid_t id, struct timespec *at) {
    if (!now_ns || id == CLOCK_REALTIME || id == CLOCK_PROCESS_CPUTIME_ID || id == CLOCK_THREAD_CPUTIME_ID)
        return (int)syscall(SYS_clock_gettime, id, at);
    now_ns += 1000;
    *at = (struct timespec){now_ns / 1000000000, now_ns % 1000000000};
    return 0;
}

int sched_yield(void) { return now_ns ? 0 : (int)syscall(SYS_sched_yield); }

/* A lock's deadline is one of this clock, of which the kernel knows nothing; no case waits until one is over. */
int sem_clockwait(sem_t *semaphore, clockid_t id, const struct timespec *until) {
    (void)id, (void)until;
    return sem_wait(semaphore);
}

/* From here on the clock is the process's own. There is no way back: timers would come due by what the kernel's did meanwhile. */
void meter_keep_clock(void) {
    struct timespec at;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &at);
    now_ns = at.tv_sec * 1000000000LL + at.tv_nsec;
}

void meter_let_pass(int64_t ns) { now_ns += ns; }

void meter_start(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

/* Has callgrind write what it has counted since this was called before; then it counts from 0. */
void meter_write(void) { CALLGRIND_DUMP_STATS; }

void meter_stop(void) { CALLGRIND_STOP_INSTRUMENTATION; }
