/* Copies past the cache, and copies into it.
 *
 * A plain memcpy into memory that is not in the cache reads every line that it is about to overwrite, which is a third of its
 * traffic. Streaming (non-temporal) stores write to memory without reading, and leave the cache to what the process was working on. Whoever
 * reads the result at once finds it in memory. They are weakly ordered: an sfence at the end makes them visible before anything that this
 * thread does later, such as telling another process. The widest are chosen when the module is loaded. x86-64 only; everywhere else they are
 * memcpy, too.
 *
 * Whether a long copy into the cache finds its target there is not known, only hoped: others use the cache as well. So both ways are
 * timed. While streaming is a good deal faster, it is taken instead; less is the reader's gain worth. See copying.py, decision 25.
 *
 * Long copies are shared with helpers (copy_helpers.c). The interpreter lock is released meanwhile.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "copy_helpers.h"

#define LINE 64
#define BLOCK 2048 /* asked for at once, so that its lines come side by side; then copied */
#define SAMPLES 4 /* of each way, of which the quickest counts: what holds a copy up is no matter of how it is made */
#define PERIOD 32 /* every so many long copies, the way that is not taken is timed anew */

static copy_function copy_lines = NULL;
static long width = 0;

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
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

#else
static void choose(long widest) { (void)widest; }
static void fence(void) {}
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

static void keep(char *to, const char *from, size_t nbytes) { memcpy(to, from, nbytes); }

/* A way to make long copies into a slot that the cache should hold, and how quick it was. The interpreter lock guards both. */
struct way {
    copy_function how;
    unsigned long copies;
    int64_t ns_per_mib[SAMPLES]; /* of the last ones */
};

static struct way into_cache = {.how = keep}, past_cache = {.how = stream};

static int64_t quickest(const struct way *way)
{
    int64_t least = way->ns_per_mib[0];
    for (int i = 1; i < SAMPLES; i++)
        if (way->ns_per_mib[i] < least)
            least = way->ns_per_mib[i];
    return least;
}

static struct way *way_of_this_copy(void)
{
    if (into_cache.copies < SAMPLES || past_cache.copies < SAMPLES)
        return past_cache.copies < into_cache.copies ? &past_cache : &into_cache;
    int streams = quickest(&past_cache) * 5 / 4 < quickest(&into_cache);
    int tries_other = (into_cache.copies + past_cache.copies) % PERIOD == 0;
    return streams != tries_other ? &past_cache : &into_cache;
}

static void remember(struct way *way, int64_t ns_per_mib) { way->ns_per_mib[way->copies++ % SAMPLES] = ns_per_mib; }

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

struct extent {
    char *to;
    const char *from;
    size_t nbytes;
};

static int read_extent(PyObject *arguments, struct extent *extent)
{
    unsigned long long to, from;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(arguments, "KKn", &to, &from, &nbytes))
        return 0;
    if (nbytes < 0) {
        PyErr_SetString(PyExc_ValueError, "nbytes is negative");
        return 0;
    }
    *extent = (struct extent){(char *)(uintptr_t)to, (const char *)(uintptr_t)from, (size_t)nbytes};
    return 1;
}

static void copy(struct extent extent, copy_function how)
{
    Py_BEGIN_ALLOW_THREADS
    copy_with_helpers(how, extent.to, extent.from, extent.nbytes);
    Py_END_ALLOW_THREADS
}

static PyObject *copy_past_cache(PyObject *module, PyObject *arguments)
{
    struct extent extent;
    (void)module;
    if (!read_extent(arguments, &extent))
        return NULL;
    copy(extent, stream);
    Py_RETURN_NONE;
}

static PyObject *copy_into_cache(PyObject *module, PyObject *arguments)
{
    struct extent extent;
    (void)module;
    if (!read_extent(arguments, &extent))
        return NULL;
    if (extent.nbytes < LONG_COPY) {
        copy(extent, keep);
    } else {
        struct way *way = way_of_this_copy();
        int64_t since = now_ns();
        copy(extent, way->how);
        remember(way, (now_ns() - since) / (int64_t)(extent.nbytes >> 20));
    }
    Py_RETURN_NONE;
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

static long use_helpers(long most) { return limit_helpers((int)most); }

static PyObject *limit_width(PyObject *module, PyObject *argument)
{
    (void)module;
    return number(use_width, argument);
}

static PyObject *pretend(PyObject *module, PyObject *arguments)
{
    long long into, past;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "LL", &into, &past))
        return NULL;
    for (int i = 0; i < SAMPLES; i++) {
        remember(&into_cache, into);
        remember(&past_cache, past);
    }
    Py_RETURN_NONE;
}

static PyObject *long_copies(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return Py_BuildValue("kk", into_cache.copies, past_cache.copies);
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
    {"pretend", pretend, METH_VARARGS,
     "pretend(into, past)\n--\n\nAs if four long copies into the cache and past it had just taken so many nanoseconds for a MiB."},
    {"long_copies", long_copies, METH_NOARGS,
     "long_copies()\n--\n\nReturns how many long copies that were to go into the cache did, and how many went past it."},
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
