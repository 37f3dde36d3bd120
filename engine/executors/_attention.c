/* Attention of single tokens to contexts that stay where they are. See single_tokens.py.
 *
 * Theory of operation. A token has one query for each head, and some heads (a group) share the keys and values of a context. A piece of
 * work is one token and one such group. Its keys are read from beginning to end, block by block, and after each block of keys the same
 * block of values: memory is read once, in order, for up to four heads. A block's scores become weights relative to the greatest score so
 * far; when a greater one comes, what was summed before is scaled down. A piece of work touches no other, so its result is the same, bit
 * for bit, whatever else is computed.
 *
 * Sums are in float32, whatever keys and values are kept in, in vectors of 16 numbers. So there are only x86-64 processors with AVX-512
 * here: with shorter vectors, torch is as fast. Everywhere else, the module says that it has no attention.
 *
 * Source: softmax in one pass is Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); in blocks, with values, Dao
 * et al., "FlashAttention" (2022).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define PAIR 32   /* numbers that are loaded together: two vectors */
#define HEADS 4   /* of a group that are computed together; if there are fewer, the others are nought */
#define BLOCK 16 /* tokens: so few that the processor asks for the keys of the next ones while it adds the values of these */
#define MOST 256  /* numbers of a key */
#define AHEAD 4096 /* bytes: how long before its use memory is asked for; where it is not mapped, nothing happens */

#define LOG2_E 1.44269504088896341

/* What a step says of a token, as single_tokens.py writes it. */
struct place {
    int64_t column; /* of the flat sequence */
    int64_t shelf;  /* which */
    int64_t index;  /* of the row */
    int64_t length; /* tokens that it sees, itself the last */
};

/* Memory of a layer: keys and values, each of shape (rows, groups, capacity, size). */
struct shelf {
    uint64_t keys, values; /* addresses */
    int64_t rows, capacity;
};

/* Of each token and head, a vector; the numbers of a vector lie side by side. */
struct vectors {
    char *data;
    Py_ssize_t head, token; /* strides, in numbers */
};

struct step {
    const struct place *places;
    const struct shelf *shelves;
    struct vectors query, key, value, output;
    Py_ssize_t columns, heads, groups, size;
    int is_bfloat16;
    float scale;
};

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f")))
#define INLINED AVX512 static inline __attribute__((always_inline))

#ifdef __clang__
#define EACH(item, count) for (int item = 0; item < (count); item++)
#else /* gcc keeps a loop's vectors in memory, unless it is told to unroll it */
#define EACH(item, count) _Pragma("GCC unroll 4") for (int item = 0; item < (count); item++)
#endif

/* Loads PAIR numbers. Two of bfloat16 are one word, whose halves are the upper halves of numbers of float32: the even numbers go into one
 * vector and the odd ones into the other. Queries are put into the same order once, and the output back into that of memory. */
INLINED void load(__m512 *first, __m512 *second, const char *from, int is_bfloat16)
{
    if (is_bfloat16) {
        __m512i both = _mm512_loadu_si512((const void *)from);
        *first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        *second = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
    } else {
        *first = _mm512_loadu_ps((const void *)from);
        *second = _mm512_loadu_ps((const void *)(from + LANES * sizeof(float)));
    }
}

/* Where a number of a key stands in that order. */
static inline Py_ssize_t place_of(Py_ssize_t number, int is_bfloat16)
{
    return is_bfloat16 ? number / PAIR * PAIR + number % 2 * LANES + number % PAIR / 2 : number;
}

static inline float load_one(const char *from, Py_ssize_t index, int is_bfloat16)
{
    float number;
    uint32_t bits = 0;
    if (is_bfloat16) {
        uint16_t half;
        memcpy(&half, from + 2 * index, sizeof(half));
        bits = (uint32_t)half << 16;
    } else {
        memcpy(&bits, from + 4 * index, sizeof(bits));
    }
    memcpy(&number, &bits, sizeof(number));
    return number;
}

static inline void store_one(char *to, Py_ssize_t index, float number, int is_bfloat16)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof(bits));
    if (is_bfloat16) {
        uint16_t half = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); /* to the nearest, ties to even */
        if (number != number)
            half = 0x7fc0;
        memcpy(to + 2 * index, &half, sizeof(half));
    } else {
        memcpy(to + 4 * index, &bits, sizeof(bits));
    }
}

/* 2 to the power of numbers up to 0, with an error of some units of the last place; NaN stays NaN. */
INLINED __m512 power_of_2(__m512 x)
{
    static const float coefficients[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x); /* of which the power is 0; if one is NaN, the second is the greater */
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_sub_ps(x, whole); /* -0.5 to 0.5; the coefficients are ln(2)^n / n! */
    __m512 power = _mm512_set1_ps(1.5252734e-5f);
    for (int n = 0; n < 7; n++)
        power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(coefficients[n]));
    return _mm512_scalef_ps(power, whole);
}

/* The sums of four vectors, of each four neighbours: those of a, b, c and d side by side. */
INLINED __m512 sum_fours(__m512 a, __m512 b, __m512 c, __m512 d)
{
    __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
}

/* The sums of the four fours of each of four vectors: that of a, then those of b, c and d. */
INLINED __m512 sum_of_fours(__m512 a, __m512 b, __m512 c, __m512 d)
{
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

/* Scores of a block's tokens, for HEADS heads side by side; there is room for whole turns of four tokens. */
INLINED void score(float *scores, const float *queries, const char *keys, Py_ssize_t tokens, Py_ssize_t size, int is_bfloat16)
{
    Py_ssize_t nbytes = is_bfloat16 ? 2 : 4;
    for (Py_ssize_t token = 0; token < tokens; token += 4) {
        __m512 of_token[4];
        EACH(i, 4) {
            const char *key = keys + (token + i < tokens ? token + i : tokens - 1) * size * nbytes;
            __m512 sums[HEADS];
            EACH(head, HEADS) sums[head] = _mm512_setzero_ps();
            for (Py_ssize_t at = 0; at < size; at += PAIR) {
                __m512 first, second;
                __builtin_prefetch(key + at * nbytes + AHEAD);
                load(&first, &second, key + at * nbytes, is_bfloat16);
                EACH(head, HEADS) {
                    sums[head] = _mm512_fmadd_ps(first, _mm512_load_ps(queries + head * size + at), sums[head]);
                    sums[head] = _mm512_fmadd_ps(second, _mm512_load_ps(queries + head * size + at + LANES), sums[head]);
                }
            }
            of_token[i] = sum_fours(sums[0], sums[1], sums[2], sums[3]);
        }
        _mm512_store_ps(scores + token * HEADS, sum_of_fours(of_token[0], of_token[1], of_token[2], of_token[3]));
    }
    for (Py_ssize_t rest = tokens * HEADS; rest % LANES; rest++)
        scores[rest] = -INFINITY;
}

/* Adds a block's values, each so many times, to the sums of HEADS heads. */
INLINED void add(float *sums, const float *weights, const char *values, Py_ssize_t tokens, Py_ssize_t size, int is_bfloat16)
{
    Py_ssize_t nbytes = is_bfloat16 ? 2 : 4;
    for (Py_ssize_t at = 0; at < size; at += PAIR) {
        __m512 even[HEADS], odd[HEADS];
        EACH(head, HEADS) {
            even[head] = _mm512_load_ps(sums + head * size + at);
            odd[head] = _mm512_load_ps(sums + head * size + at + LANES);
        }
        for (Py_ssize_t token = 0; token < tokens; token++) {
            const char *value = values + (token * size + at) * nbytes;
            __m512 first, second;
            __builtin_prefetch(value + AHEAD);
            load(&first, &second, value, is_bfloat16);
            EACH(head, HEADS) {
                __m512 weight = _mm512_set1_ps(weights[token * HEADS + head]);
                even[head] = _mm512_fmadd_ps(first, weight, even[head]);
                odd[head] = _mm512_fmadd_ps(second, weight, odd[head]);
            }
        }
        EACH(head, HEADS) {
            _mm512_store_ps(sums + head * size + at, even[head]);
            _mm512_store_ps(sums + head * size + at + LANES, odd[head]);
        }
    }
}

/* Attention of up to HEADS heads, from the first of them. */
INLINED void attend_heads(
    const struct step *step, Py_ssize_t column, Py_ssize_t first, Py_ssize_t heads, const char *keys, const char *values,
    Py_ssize_t length, int is_bfloat16)
{
    float queries[HEADS * MOST] __attribute__((aligned(64)));
    float sums[HEADS * MOST] __attribute__((aligned(64)));
    float scores[HEADS * BLOCK] __attribute__((aligned(64)));
    float of_heads[LANES] __attribute__((aligned(64))); /* HEADS numbers, four times */
    Py_ssize_t size = step->size, nbytes = is_bfloat16 ? 2 : 4;
    __m512 greatest = _mm512_set1_ps(-FLT_MAX), total = _mm512_setzero_ps();
    memset(sums, 0, sizeof(float) * (size_t)(HEADS * size));
    memset(queries, 0, sizeof(float) * (size_t)(HEADS * size));
    for (Py_ssize_t head = 0; head < heads; head++) {
        const char *query = step->query.data + ((first + head) * step->query.head + column * step->query.token) * nbytes;
        for (Py_ssize_t at = 0; at < size; at++)
            queries[head * size + place_of(at, is_bfloat16)] = step->scale * load_one(query, at, is_bfloat16);
    }
    for (Py_ssize_t start = 0; start < length; start += BLOCK) {
        Py_ssize_t tokens = length - start < BLOCK ? length - start : BLOCK;
        score(scores, queries, keys + start * size * nbytes, tokens, size, is_bfloat16);
        __m512 before = greatest;
        for (Py_ssize_t at = 0; at < tokens * HEADS; at += LANES)
            greatest = _mm512_max_ps(_mm512_load_ps(scores + at), greatest);
        greatest = _mm512_max_ps(greatest, _mm512_shuffle_f32x4(greatest, greatest, 0x4e));
        greatest = _mm512_max_ps(greatest, _mm512_shuffle_f32x4(greatest, greatest, 0xb1));
        if (start && _mm512_cmp_ps_mask(before, greatest, _CMP_NEQ_UQ)) { /* once the greatest score has come, rarely */
            __m512 shrunk = power_of_2(_mm512_sub_ps(before, greatest));
            total = _mm512_mul_ps(total, shrunk);
            _mm512_store_ps(of_heads, shrunk);
            for (Py_ssize_t head = 0; head < HEADS; head++)
                for (Py_ssize_t at = 0; at < size; at++)
                    sums[head * size + at] *= of_heads[head];
        }
        for (Py_ssize_t at = 0; at < tokens * HEADS; at += LANES) {
            __m512 weights = power_of_2(_mm512_sub_ps(_mm512_load_ps(scores + at), greatest));
            total = _mm512_add_ps(total, weights);
            _mm512_store_ps(scores + at, weights);
        }
        add(sums, scores, values + start * size * nbytes, tokens, size, is_bfloat16);
    }
    total = _mm512_add_ps(total, _mm512_shuffle_f32x4(total, total, 0x4e));
    _mm512_store_ps(of_heads, _mm512_add_ps(total, _mm512_shuffle_f32x4(total, total, 0xb1)));
    for (Py_ssize_t head = 0; head < heads; head++) {
        char *output = step->output.data + ((first + head) * step->output.head + column * step->output.token) * nbytes;
        for (Py_ssize_t at = 0; at < size; at++)
            store_one(output, at, sums[head * size + place_of(at, is_bfloat16)] / of_heads[head], is_bfloat16);
    }
}

/* A piece of work. Its token's keys and values are put behind those that are there. */
INLINED void attend_group(const struct step *step, Py_ssize_t piece, int is_bfloat16)
{
    const struct place *place = &step->places[piece / step->groups];
    const struct shelf *shelf = &step->shelves[place->shelf];
    Py_ssize_t group = piece % step->groups, in_group = step->heads / step->groups;
    Py_ssize_t nbytes = is_bfloat16 ? 2 : 4, of_token = step->size * nbytes;
    Py_ssize_t row = (place->index * step->groups + group) * shelf->capacity * of_token, last = (place->length - 1) * of_token;
    char *keys = (char *)(uintptr_t)shelf->keys + row, *values = (char *)(uintptr_t)shelf->values + row;
    memcpy(keys + last, step->key.data + nbytes * (group * step->key.head + place->column * step->key.token), (size_t)of_token);
    memcpy(values + last, step->value.data + nbytes * (group * step->value.head + place->column * step->value.token), (size_t)of_token);
    for (Py_ssize_t first = 0; first < in_group; first += HEADS) {
        Py_ssize_t heads = in_group - first < HEADS ? in_group - first : HEADS;
        attend_heads(step, place->column, group * in_group + first, heads, keys, values, place->length, is_bfloat16);
    }
}

AVX512 static void attend_pieces(const struct step *step, Py_ssize_t first, Py_ssize_t end)
{
    for (Py_ssize_t piece = first; piece < end; piece++) {
        if (step->is_bfloat16)
            attend_group(step, piece, 1);
        else
            attend_group(step, piece, 0);
    }
}

static int is_supported(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") != 0;
}

#else
static void attend_pieces(const struct step *step, Py_ssize_t first, Py_ssize_t end) { (void)step, (void)first, (void)end; }
static int is_supported(void) { return 0; }
#endif

/* Why the pieces from first to end can't be computed, or NULL: nothing beside the memory that is described would be read or written. */
static const char *fault(const struct step *step, Py_ssize_t places, Py_ssize_t shelves, Py_ssize_t first, Py_ssize_t end)
{
    if (!is_supported())
        return "this processor has no attention here";
    if (step->size < PAIR || step->size > MOST || step->size % PAIR)
        return "keys have another size";
    if (step->groups < 1 || step->heads < step->groups || step->heads % step->groups)
        return "heads share no keys evenly";
    if (first < 0 || first > end || end / step->groups > places || (end / step->groups == places && end % step->groups))
        return "there are fewer pieces of work";
    for (Py_ssize_t number = 0; number < places; number++) {
        const struct place *place = &step->places[number];
        if (place->shelf < 0 || place->shelf >= shelves)
            return "there is no such shelf";
        const struct shelf *shelf = &step->shelves[place->shelf];
        if (place->index < 0 || place->index >= shelf->rows || place->length < 1 || place->length > shelf->capacity)
            return "a context is not on its shelf";
        if (place->column < 0 || place->column >= step->columns)
            return "there is no such token";
    }
    return NULL;
}

static int read_vectors(PyObject *object, void *result)
{
    struct vectors *vectors = result;
    unsigned long long address;
    if (!PyArg_ParseTuple(object, "Knn", &address, &vectors->head, &vectors->token))
        return 0;
    vectors->data = (char *)(uintptr_t)address;
    return 1;
}

static PyObject *attend(PyObject *module, PyObject *arguments)
{
    struct step step;
    Py_buffer places = {0}, shelves = {0};
    Py_ssize_t first, end;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*y*O&O&O&O&(nnnn)pfnn", &places, &shelves, read_vectors, &step.query, read_vectors, &step.key,
                          read_vectors, &step.value, read_vectors, &step.output, &step.columns, &step.heads, &step.groups, &step.size,
                          &step.is_bfloat16, &step.scale, &first, &end))
        return NULL;
    step.places = places.buf;
    step.shelves = shelves.buf;
    step.scale *= (float)LOG2_E;
    const char *wrong =
        fault(&step, places.len / (Py_ssize_t)sizeof(struct place), shelves.len / (Py_ssize_t)sizeof(struct shelf), first, end);
    if (wrong == NULL) {
        Py_BEGIN_ALLOW_THREADS
        attend_pieces(&step, first, end);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&places);
    PyBuffer_Release(&shelves);
    if (wrong != NULL)
        return PyErr_Format(PyExc_ValueError, "%s", wrong);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"attend", attend, METH_VARARGS,
     "attend(places, shelves, query, key, value, output, shape, is_bfloat16, scale, first, end)\n--\n\n"
     "Computes pieces of work: each is a token and the heads that share keys. Memory is given by addresses."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) { return PyModule_AddObjectRef(module, "SUPPORTED", is_supported() ? Py_True : Py_False); }

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "shmring.engine.executors._attention",
    .m_doc = "Attention of single tokens. See single_tokens.py.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__attention(void) { return PyModuleDef_Init(&definition); }
