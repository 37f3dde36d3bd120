/* Copies past the cache, and copies into it that read nothing of what they overwrite.
 *
 * A plain memcpy into memory that is not in the cache reads every line that it is about to overwrite, which is a third of its
 * traffic. Two kinds of stores do not, and each is right somewhere else: see copying.py.
 *
 * Streaming (non-temporal) stores write to memory, and leave the cache to what the process was working on. Whoever reads the result
 * at once finds it in memory. They are weakly ordered: an sfence at the end makes them visible before anything that this
 * thread does later, such as telling another process. The widest are chosen when the module is loaded.
 *
 * "rep movsb" is one instruction, and the processor, which knows that whole lines are coming, takes them over without reading them.
 * What was written is in the cache. How good it is differs from one processor to the next, so the first copy measures it beside
 * memcpy, which takes half a millisecond.
 *
 * x86-64 only; everywhere else both are memcpy. Long copies are shared with helpers (copy_helpers.c). The interpreter lock is released
 * meanwhile.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "copy_helpers.h"

#define LINE 64
#define PAGE 4096
#define BLOCK 2048 /* asked for at once, so that its lines come side by side; then copied */
#define TRIAL (1 << 20)
#define TRIALS 5

static copy_function copy_lines = NULL;
static long width = 0;

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>
#include <immintrin.h>

/* Each copies a whole number of lines to an address that is a multiple of LINE. Two lines a turn: enough to keep the
 * stores going while loads are under way; the hardware prefetcher follows the reads. */

__attribute__((target("avx512f"))) static void lines_avx512(char *to, const char *from, size_t nbytes)
{
    const char *end = to + nbytes;
    for (; to + 2 * LINE <= end; to += 2 * LINE, from += 2 * LINE) {
        __m512i a = _mm512_loadu_si512((const void *)from);
        __m512i b = _mm512_loadu_si512((const void *)(from + 64));
        _mm512_stream_si512((__m512i *)to, a);
        _mm512_stream_si512((__m512i *)(to + 64), b);
    }
    if (to < end)
        _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512((const void *)from));
}

__attribute__((target("avx2"))) static void lines_avx2(char *to, const char *from, size_t nbytes)
{
    for (const char *end = to + nbytes; to < end; to += LINE, from += LINE) {
        __m256i a = _mm256_loadu_si256((const __m256i *)from);
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
        _mm256_stream_si256((__m256i *)to, a);
        _mm256_stream_si256((__m256i *)(to + 32), b);
    }
}

static void lines_sse2(char *to, const char *from, size_t nbytes)
{
    for (const char *end = to + nbytes; to < end; to += LINE, from += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
}

static void choose(long widest)
{
    __builtin_cpu_init();
    copy_lines = NULL;
    width = 0;
    if (widest >= 64 && __builtin_cpu_supports("avx512f")) {
        copy_lines = lines_avx512;
        width = 64;
    } else if (widest >= 32 && __builtin_cpu_supports("avx2")) {
        copy_lines = lines_avx2;
        width = 32;
    } else if (widest >= 16) {
        copy_lines = lines_sse2;
        width = 16;
    }
}

static void fence(void) { _mm_sfence(); }

static void move_bytes(char *to, const char *from, size_t nbytes)
{
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(nbytes) : : "memory");
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int64_t least_ns(int64_t least, int64_t since)
{
    int64_t took = now_ns() - since;
    return took < least ? took : least;
}

static int moves_whole_lines(void)
{
    unsigned a, b, c, d;
    int64_t moved = INT64_MAX, copied = INT64_MAX;
    char *to, *from;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & (1u << 9))) /* ERMS: strings are moved by more than bytes */
        return 0;
    from = malloc(2 * TRIAL);
    if (from == NULL)
        return 0;
    to = from + TRIAL;
    memset(from, 1, 2 * TRIAL);
    for (int i = 0; i < TRIALS; i++) {
        int64_t since = now_ns();
        memcpy(to, from, TRIAL);
        copied = least_ns(copied, since);
        since = now_ns();
        move_bytes(to, from, TRIAL);
        moved = least_ns(moved, since);
    }
    free(from);
    return moved <= copied + copied / 10;
}
#else
static void choose(long widest) { (void)widest; }
static void fence(void) {}
static void move_bytes(char *to, const char *from, size_t nbytes) { memcpy(to, from, nbytes); }
static int moves_whole_lines(void) { return 0; }
#endif

static void stream(char *to, const char *from, size_t nbytes)
{
    size_t head = (size_t)(-(uintptr_t)to) % LINE;
    if (copy_lines == NULL || nbytes < head + LINE) {
        memcpy(to, from, nbytes);
        return;
    }
    memcpy(to, from, head);
    size_t at = head, end = head + (nbytes - head) / LINE * LINE;
    while (at < end) {
        size_t block = end - at < BLOCK ? end - at : BLOCK;
        for (size_t line = 0; line < block; line += LINE)
            __builtin_prefetch(from + at + line);
        copy_lines(to + at, from + at, block);
        at += block;
    }
    fence();
    memcpy(to + end, from + end, nbytes - end);
}

static atomic_int is_moving = -1; /* not known yet */

/* Measures, if nobody has. Of threads that do so at the same time the last one is believed: copies are right either way. */
static int measured(void)
{
    int known = atomic_load_explicit(&is_moving, memory_order_relaxed);
    if (known < 0)
        atomic_store_explicit(&is_moving, known = moves_whole_lines(), memory_order_relaxed);
    return known;
}

static void move(char *to, const char *from, size_t nbytes)
{
    /* Where the target lies less than a line behind the source, pages apart, processors take each load for one of what was
     * just stored, and move bytes slowly. */
    size_t behind = ((uintptr_t)to - (uintptr_t)from) % PAGE;
    if (!measured() || (behind && behind < LINE))
        memcpy(to, from, nbytes);
    else
        move_bytes(to, from, nbytes);
}

static PyObject *copy(PyObject *arguments, copy_function how)
{
    unsigned long long to, from;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(arguments, "KKn", &to, &from, &nbytes))
        return NULL;
    if (nbytes < 0) {
        PyErr_SetString(PyExc_ValueError, "nbytes is negative");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    measured(); /* before helpers keep the cores busy */
    copy_with_helpers(how, (char *)(uintptr_t)to, (const char *)(uintptr_t)from, (size_t)nbytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *copy_past_cache(PyObject *module, PyObject *arguments)
{
    (void)module;
    return copy(arguments, stream);
}

static PyObject *copy_into_cache(PyObject *module, PyObject *arguments)
{
    (void)module;
    return copy(arguments, move);
}

/* -- for tests --------------------------------------------------------------------------------------------------------- */

static PyObject *number(long (*use)(long), PyObject *argument)
{
    long value = PyLong_AsLong(argument);
    if (value == -1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(use(value));
}

static long use_width(long widest)
{
    choose(widest);
    return width;
}

static long use_moving(long wanted)
{
    if (wanted >= 0)
        atomic_store_explicit(&is_moving, wanted > 0, memory_order_relaxed);
    return measured();
}

static long use_helpers(long most) { return limit_helpers((int)most); }

static PyObject *limit_width(PyObject *module, PyObject *argument)
{
    (void)module;
    return number(use_width, argument);
}

static PyObject *move_lines(PyObject *module, PyObject *argument)
{
    (void)module;
    return number(use_moving, argument);
}

static PyObject *limit_copy_helpers(PyObject *module, PyObject *argument)
{
    (void)module;
    return number(use_helpers, argument);
}

static PyObject *helped(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromUnsignedLong(pieces_helped());
}

static PyMethodDef methods[] = {
    {"copy_past_cache", copy_past_cache, METH_VARARGS,
     "copy_past_cache(to, from_, nbytes)\n--\n\nCopies between two addresses that do not overlap, past the cache."},
    {"copy_into_cache", copy_into_cache, METH_VARARGS,
     "copy_into_cache(to, from_, nbytes)\n--\n\nCopies between two addresses that do not overlap, into the cache."},
    {"limit_width", limit_width, METH_O,
     "limit_width(nbytes)\n--\n\nUses streaming stores of at most so many bytes, and returns how many those are."},
    {"move_lines", move_lines, METH_O,
     "move_lines(whether)\n--\n\nCopies into the cache by moving bytes (1) or memcpy (0); -1 changes nothing. Returns which."},
    {"limit_helpers", limit_copy_helpers, METH_O,
     "limit_helpers(most)\n--\n\nHas long copies helped by at most so many threads, and returns how many there can be."},
    {"pieces_helped", helped, METH_NOARGS, "pieces_helped()\n--\n\nReturns how many pieces of long copies helpers made."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    choose(64);
    if (prepare_helpers()) {
        PyErr_NoMemory();
        return -1;
    }
    return PyModule_AddIntConstant(module, "WIDTH", width);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "shmring.memory._copying",
    .m_doc = "Copies past the cache and into it. See copying.py.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__copying(void) { return PyModuleDef_Init(&definition); }
