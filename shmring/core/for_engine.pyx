"""What an engine is told of a request besides its payload.

A new argument is a field of :class:`ForEngine`, and a line in each function here that deals with the fields: they are taken from
the call, checked, written to the record of a submission, and read there. Everything between a call and its claim hands on the
object and names no field.
"""

cimport cython
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport uint8_t, uint64_t

from shmring.door import MAX_NAME_CHARACTERS, check_name

cdef enum:
    FOR_ENGINE_MEMBERS = 1         # of the record
    _MAX_NAME_CHARACTERS = 256
    FOR_ENGINE_NBYTES = 4 * _MAX_NAME_CHARACTERS + 9  # at most, in the record

assert MAX_NAME_CHARACTERS == _MAX_NAME_CHARACTERS


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class ForEngine:
    """What an engine is told of a request besides its payload.

    Args:
        request_id: the caller's own name for the request; may be empty.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ``request_id`` is too long, or is no Unicode.
    """

    cdef readonly str request_id

    def __init__(self, *, request_id: str = "") -> None:
        check_name(request_id, "request_id")
        self.request_id = request_id

    cdef uint64_t most_nbytes(self) except 0:
        """The most that :meth:`put` writes."""
        cdef Py_ssize_t nbytes = 0
        PyUnicode_AsUTF8AndSize(self.request_id, &nbytes)
        return nbytes + 9

    cdef uint8_t* put(self, uint8_t* to) noexcept:
        """Writes the members of the record; returns where they end."""
        cdef Py_ssize_t nbytes = 0
        cdef const char* name = PyUnicode_AsUTF8AndSize(self.request_id, &nbytes)
        return put_text(to, name, nbytes)


cdef ForEngine NOTHING_TOLD = ForEngine()


cdef ForEngine for_engine_of(str request_id):
    """Returns what an engine is told by a call of a client. Raises as :class:`ForEngine`."""
    return NOTHING_TOLD if not PyUnicode_GET_LENGTH(request_id) else ForEngine(request_id=request_id)


cdef ForEngine read_for_engine(Cursor* cursor):
    """Reads the members of the record."""
    cdef Value value
    cdef ForEngine told
    if read_value(cursor, &value) != TEXT or value.nbytes > 4 * _MAX_NAME_CHARACTERS:
        raise wrong("its name is no text of at most 256 characters")
    if not value.nbytes:
        return NOTHING_TOLD
    told = ForEngine.__new__(ForEngine)
    told.request_id = text_of(&value)
    if PyUnicode_GET_LENGTH(told.request_id) > _MAX_NAME_CHARACTERS:
        raise wrong("its name is no text of at most 256 characters")
    return told
