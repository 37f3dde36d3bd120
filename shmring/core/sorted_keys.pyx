"""Distinct 64-bit keys in order: insert, remove, the next one up and the next one down.

The keys lie in chunks of at most 128, each sorted, and the chunks lie in order in one array. So a search is two
bisections, and an insertion moves half a kilobyte in the middle, however many keys there are. A list in one piece moves
40 KB at ten thousand keys, and a tree reads as many cache lines as it has levels, for twice the code.

A chunk that is full is split in two. One that becomes small is joined with its neighbour, so that the number of chunks
follows the number of keys. Memory for a split is taken before a book changes anything (:meth:`SortedKeys.make_ready`):
an insertion itself never fails.

Invariants: no chunk is empty; keys grow within a chunk and from each chunk to the next; ``first`` of a chunk is its first key.

Source: the layout is that of the Python package ``sortedcontainers``. Bisections add where others branch, since no processor
can foresee where a key lies (P.-V. Khuong and P. Morin, Array Layouts for Comparison-Based Searching, 2017).
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove

cdef enum:
    CHUNK_KEYS = 128  # a kilobyte: moving half of it takes some 20 ns, and ten thousand keys are eighty chunks
    MAX_SPLITS = 2    # chunks that are kept ready: no change of a book inserts more keys than this into one list


cdef struct Chunk:
    uint64_t first  # a copy of its first key: a search for a chunk reads only these, in one piece of memory
    uint64_t* keys  # in order, at least one
    uint32_t count


cdef uint32_t _first_not_below(const uint64_t* keys, uint32_t count, uint64_t key) noexcept nogil:
    """Returns the place of the first key that is at least ``key``; ``count`` if there is none."""
    cdef uint32_t low = 0, half
    while count > 1:
        half = count >> 1
        low += half * (keys[low + half - 1] < key)
        count -= half
    return low + (count == 1 and keys[low] < key)


cdef class SortedKeys:
    cdef Chunk* chunks
    cdef uint32_t count
    cdef uint32_t capacity
    cdef uint64_t* ready[MAX_SPLITS]

    def __cinit__(self):
        self.chunks = NULL
        self.count = self.capacity = 0
        self.ready[0] = self.ready[1] = NULL

    def __dealloc__(self):
        cdef uint32_t place
        for place in range(self.count):
            free(self.chunks[place].keys)
        free(self.chunks)
        for place in range(MAX_SPLITS):
            free(self.ready[place])

    cdef int make_ready(self) except -1:
        """Takes the memory that the next :data:`MAX_SPLITS` insertions may need. Raises MemoryError, and changes no key."""
        cdef uint32_t place, capacity
        cdef void* memory
        if self.count + MAX_SPLITS > self.capacity:
            capacity = 2 * self.capacity + MAX_SPLITS
            memory = realloc(self.chunks, capacity * sizeof(Chunk))
            if memory == NULL:
                raise MemoryError
            self.chunks = <Chunk*>memory
            self.capacity = capacity
        for place in range(MAX_SPLITS):
            if self.ready[place] == NULL:
                self.ready[place] = <uint64_t*>malloc(CHUNK_KEYS * sizeof(uint64_t))
                if self.ready[place] == NULL:
                    raise MemoryError
        return 0

    cdef uint32_t _chunk_of(self, uint64_t key) noexcept nogil:
        """Returns the place of the last chunk that begins at or below ``key``; 0 if all begin above it."""
        cdef uint32_t low = 0, count = self.count, half
        while count > 1:
            half = count >> 1
            low += half * (self.chunks[low + half - 1].first <= key)
            count -= half
        low += count == 1 and self.chunks[low].first <= key
        return low - 1 if low else 0

    cdef void insert(self, uint64_t key) noexcept nogil:
        """Adds a key that is not there. The caller has called :meth:`make_ready` since the last two insertions."""
        cdef uint32_t place = self._chunk_of(key), at, half = CHUNK_KEYS // 2
        cdef Chunk* chunk
        cdef uint64_t* memory
        if not self.count or self.chunks[place].count == CHUNK_KEYS:
            memory = self.ready[1] if self.ready[0] == NULL else self.ready[0]
            if memory == self.ready[0]:
                self.ready[0] = NULL
            else:
                self.ready[1] = NULL
            if not self.count:
                self.chunks[0].keys = memory
                self.chunks[0].count = 0
            else:
                memmove(&self.chunks[place + 2], &self.chunks[place + 1], (self.count - place - 1) * sizeof(Chunk))
                memcpy(memory, &self.chunks[place].keys[half], (CHUNK_KEYS - half) * sizeof(uint64_t))
                self.chunks[place + 1].keys, self.chunks[place + 1].first = memory, memory[0]
                self.chunks[place + 1].count = CHUNK_KEYS - half
                self.chunks[place].count = half
                if key > memory[0]:
                    place += 1
            self.count += 1
        chunk = &self.chunks[place]
        at = _first_not_below(chunk.keys, chunk.count, key)
        memmove(&chunk.keys[at + 1], &chunk.keys[at], (chunk.count - at) * sizeof(uint64_t))
        chunk.keys[at] = key
        chunk.first = chunk.keys[0]
        chunk.count += 1

    cdef bint remove(self, uint64_t key) noexcept nogil:
        """Takes a key away; returns False, and changes nothing, if it is not there."""
        cdef uint32_t place, at
        cdef Chunk* chunk
        if not self.count:
            return False
        place = self._chunk_of(key)
        chunk = &self.chunks[place]
        at = _first_not_below(chunk.keys, chunk.count, key)
        if at == chunk.count or chunk.keys[at] != key:
            return False
        chunk.count -= 1
        memmove(&chunk.keys[at], &chunk.keys[at + 1], (chunk.count - at) * sizeof(uint64_t))
        if not chunk.count:
            self._drop_chunk(place)
            return True
        chunk.first = chunk.keys[0]
        if place + 1 < self.count and chunk.count + self.chunks[place + 1].count <= CHUNK_KEYS // 2:
            memcpy(&chunk.keys[chunk.count], self.chunks[place + 1].keys, self.chunks[place + 1].count * sizeof(uint64_t))
            chunk.count += self.chunks[place + 1].count
            self._drop_chunk(place + 1)
        return True

    cdef void exchange(self, uint64_t key, uint64_t by) noexcept nogil:
        """Takes a key away that is there, and adds one that is not. The caller has called :meth:`make_ready`."""
        cdef uint32_t place = self._chunk_of(key), at
        cdef Chunk* chunk = &self.chunks[place]
        at = _first_not_below(chunk.keys, chunk.count, key)
        if (chunk.keys[at - 1] < by if at else not place) and (
            by < chunk.keys[at + 1] if at + 1 < chunk.count else place + 1 == self.count
        ):
            chunk.keys[at] = by
            chunk.first = chunk.keys[0]
        else:
            self.remove(key)
            self.insert(by)

    cdef void replace(self, uint64_t key, uint64_t by) noexcept nogil:
        """Puts another key in the place of one that is there; no other key lies between the two."""
        cdef Chunk* chunk = &self.chunks[self._chunk_of(key)]
        chunk.keys[_first_not_below(chunk.keys, chunk.count, key)] = by
        chunk.first = chunk.keys[0]

    cdef void _drop_chunk(self, uint32_t place) noexcept nogil:
        free(self.chunks[place].keys)
        self.count -= 1
        memmove(&self.chunks[place], &self.chunks[place + 1], (self.count - place) * sizeof(Chunk))

    cdef bint first_from(self, uint64_t key, uint64_t* found) noexcept nogil:
        """Finds the lowest key that is at least ``key``; returns whether there is one."""
        cdef uint32_t place, at
        if not self.count:
            return False
        place = self._chunk_of(key)
        at = _first_not_below(self.chunks[place].keys, self.chunks[place].count, key)
        if at == self.chunks[place].count:
            place, at = place + 1, 0
            if place == self.count:
                return False
        found[0] = self.chunks[place].keys[at]
        return True

    cdef bint last_below(self, uint64_t key, uint64_t* found) noexcept nogil:
        """Finds the highest key below ``key``; returns whether there is one."""
        cdef uint32_t place, at
        if not self.count or not key:
            return False
        place = self._chunk_of(key - 1)
        at = _first_not_below(self.chunks[place].keys, self.chunks[place].count, key)
        if not at:
            return False  # only in the first chunk: any other begins below the key
        found[0] = self.chunks[place].keys[at - 1]
        return True
