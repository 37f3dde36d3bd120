/* Copies with streaming (non-temporal) stores: what is written goes to memory without being read into the cache first.
 *
 * A plain memcpy into memory that is not in the cache reads every line that it is about to overwrite, which is a third of its
 * traffic, and throws out of the cache what the process was working on. Streaming stores do neither. Whoever reads the result
 * at once finds it in memory and not in the cache, so this pays for large copies only: see streaming.py.
 *
 * x86-64 only, with the widest stores that the processor has, chosen when the module is loaded; everywhere else the module
 * can be built and says that it has nothing to offer (WIDTH is 0). Streaming stores are weakly ordered: an sfence
 * at the end makes them visible before anything that this thread does later, such as telling another process. The
 * interpreter lock is released meanwhile.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define LINE 64

typedef void (*lines_function)(char *, const char *, size_t);

static lines_function copy_lines = NULL;
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
    if (widest >= 64 && __builtin_cpu_supports("avx512f")) {
        copy_lines = lines_avx512;
        width = 64;
    } else if (widest >= 32 && __builtin_cpu_supports("avx2")) {
        copy_lines = lines_avx2;
        width = 32;
    } else {
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
    size_t lines = (nbytes - head) / LINE * LINE;
    copy_lines(to + head, from + head, lines);
    fence();
    memcpy(to + head + lines, from + head + lines, nbytes - head - lines);
}

static PyObject *copy(PyObject *module, PyObject *arguments)
{
    unsigned long long to, from;
    Py_ssize_t nbytes;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "KKn:copy", &to, &from, &nbytes))
        return NULL;
    if (nbytes < 0) {
        PyErr_SetString(PyExc_ValueError, "nbytes is negative");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    stream((char *)(uintptr_t)to, (const char *)(uintptr_t)from, (size_t)nbytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *limit_width(PyObject *module, PyObject *argument)
{
    long widest = PyLong_AsLong(argument);
    (void)module;
    if (widest == -1 && PyErr_Occurred())
        return NULL;
    choose(widest);
    return PyLong_FromLong(width);
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS,
     "copy(to, from_, nbytes)\n--\n\nCopies between two addresses that do not overlap, past the cache."},
    {"limit_width", limit_width, METH_O,
     "limit_width(nbytes)\n--\n\nUses stores of at most so many bytes, and returns how many those are; for tests."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    choose(64);
    return PyModule_AddIntConstant(module, "WIDTH", width);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "shmring.memory._streaming",
    .m_doc = "Copies past the cache. See streaming.py.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__streaming(void) { return PyModuleDef_Init(&definition); }
