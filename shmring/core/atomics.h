/* The memory order of everything that two processes share, or two threads without the interpreter's lock: each operation beside
 * the sentence of the memory model that it stands for. Nothing else in the core orders memory.
 *
 * Source: the barriers of liburing (src/include/liburing/barrier.h) are named in this way.
 */
#ifndef SHMRING_ATOMICS_H
#define SHMRING_ATOMICS_H

#include <stdint.h>

/* Whoever sees this value with load_acquire_u64 also sees every store made before it (C11, 5.1.2.4: release, acquire). */
static inline void store_release_u64(void *at, uint64_t value) { __atomic_store_n((uint64_t *)at, value, __ATOMIC_RELEASE); }

/* What is loaded afterwards is at least as new as what the writer of this value had stored before it. */
static inline uint64_t load_acquire_u64(const void *at) { return __atomic_load_n((const uint64_t *)at, __ATOMIC_ACQUIRE); }

/* A single, untorn access that orders nothing: the fence or the acquire load beside it does. */
static inline uint32_t load_relaxed_u32(const void *at) { return __atomic_load_n((const uint32_t *)at, __ATOMIC_RELAXED); }
static inline void store_relaxed_u32(void *at, uint32_t value) { __atomic_store_n((uint32_t *)at, value, __ATOMIC_RELAXED); }

/* The same where nothing is to be ordered: numbers that stand for themselves. */
static inline uint64_t load_relaxed_u64(const void *at) { return __atomic_load_n((const uint64_t *)at, __ATOMIC_RELAXED); }
static inline void store_relaxed_u64(void *at, uint64_t value) { __atomic_store_n((uint64_t *)at, value, __ATOMIC_RELAXED); }

/* Of two processes that exchange the same flag, one gets its old value. */
static inline uint32_t exchange_u32(void *at, uint32_t value) {
    return __atomic_exchange_n((uint32_t *)at, value, __ATOMIC_ACQ_REL);
}

/* The same of a number that both ends may change. */
static inline uint64_t exchange_u64(void *at, uint64_t value) {
    return __atomic_exchange_n((uint64_t *)at, value, __ATOMIC_ACQ_REL);
}

/* Stores before it are seen by everybody before any load behind it is made. If each of two processes stores, fences and loads
 * what the other one stored, at least one of them sees the other's store. Nothing weaker says that. */
static inline void fence_full(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/* -- references: counted by the threads of one process -- */

/* A reference is only ever taken by whoever has one, so the count can't be 0 meanwhile, and there is nothing to order. */
static inline void take_reference(int32_t *count) { __atomic_fetch_add(count, 1, __ATOMIC_RELAXED); }

/* Returns how many are left. Release: what was done with the reference comes before it is dropped. Acquire: whoever drops the last
 * one, and frees, comes after all that. */
static inline int32_t drop_reference(int32_t *count) { return __atomic_sub_fetch(count, 1, __ATOMIC_ACQ_REL); }

/* Acquire: whoever sees that no other reference is left also sees what was done with them. */
static inline int32_t count_references(const int32_t *count) { return __atomic_load_n(count, __ATOMIC_ACQUIRE); }

/* -- a stack that any thread pushes to, and one takes whole -- */

/* Orders nothing: the exchange that follows fails if it has changed. */
static inline void *load_top(void *const *top) { return __atomic_load_n(top, __ATOMIC_RELAXED); }

/* Puts `item` in the place of `*seen` if that is still on top, else returns 0 and says in `*seen` what is. Release: whoever takes
 * the stack sees what the item says. */
static inline int push_top(void **top, void **seen, void *item) {
    return __atomic_compare_exchange_n(top, seen, item, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

/* Of two threads that take the stack, one gets it. Acquire: with everything that those who pushed had written. */
static inline void *take_stack(void **top, void *instead) { return __atomic_exchange_n(top, instead, __ATOMIC_ACQ_REL); }

#endif
