/* Long copies are shared with helper threads. See copy_helpers.c. */
#ifndef SHMRING_COPY_HELPERS_H
#define SHMRING_COPY_HELPERS_H

#include <stddef.h>

#define LONG_COPY ((size_t)4 << 20) /* some 0.1 to 0.5 ms of one core: many times what waking a helper takes, or looking at a clock */

typedef void (*copy_function)(char *to, const char *from, size_t nbytes);

/* Copies between memory that does not overlap, with helpers if it is long. Any thread may call it, without the interpreter lock.
 * A helper for each LONG_COPY, if there are so many. */
void copy_with_helpers(copy_function how, char *to, const char *from, size_t nbytes);

/* Once, before anything else: a forked child starts helpers of its own. Returns an error number, or 0. */
int prepare_helpers(void);

/* Lets at most so many threads help from now on; returns how many can, of those that have a core of their own here. */
int limit_helpers(int most);

/* How many pieces were copied by helpers so far. */
unsigned long pieces_helped(void);

#endif
