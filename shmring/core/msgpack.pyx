"""The part of msgpack that records need: reading bytes of any origin, and writing to a place that is large enough.

Reading makes no Python object and moves one value at a time: :c:func:`read_value` returns the next scalar, text or extension,
or the head of the next array or map, whose members are the next values. No byte after the end is read.
"""

from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from shmring.errors import RemoteProtocolError


cdef enum Kind:
    TRUNCATED   # the bytes end in the middle of the value, or are no msgpack
    NIL
    UNSIGNED    # number
    OTHER       # a negative number, a truth value, a float: records use these only in payloads
    TEXT        # data, nbytes
    BINARY      # data, nbytes
    EXTENSION   # type, data, nbytes
    ARRAY       # number: of members
    MAP         # number: of pairs


cdef struct Cursor:
    const uint8_t* at
    const uint8_t* end


cdef struct Value:
    Kind kind
    uint8_t type
    uint64_t number
    const uint8_t* data
    uint64_t nbytes


cdef extern from "<endian.h>" nogil:
    uint16_t be16toh(uint16_t)
    uint32_t be32toh(uint32_t)
    uint64_t be64toh(uint64_t)
    uint16_t le16toh(uint16_t)
    uint64_t le64toh(uint64_t)


cdef object wrong(str what):
    """Returns the error for bytes that are no message."""
    return RemoteProtocolError(f"not a message of this protocol: {what}")


cdef inline uint64_t read_big_endian(const uint8_t* at, int nbytes) noexcept nogil:
    """A number of 1, 2, 4 or 8 bytes."""
    cdef uint64_t eight = 0
    cdef uint32_t four = 0
    cdef uint16_t two = 0
    if nbytes == 1:
        return at[0]
    if nbytes == 2:
        memcpy(&two, at, 2)
        return be16toh(two)
    if nbytes == 4:
        memcpy(&four, at, 4)
        return be32toh(four)
    memcpy(&eight, at, 8)
    return be64toh(eight)


cdef inline uint64_t read_little_endian(const uint8_t* at, int nbytes) noexcept nogil:
    """A number of 2 or 8 bytes."""
    cdef uint64_t eight = 0
    cdef uint16_t two = 0
    if nbytes == 2:
        memcpy(&two, at, 2)
        return le16toh(two)
    memcpy(&eight, at, 8)
    return le64toh(eight)


cdef inline bint _read_number(Cursor* cursor, int nbytes, uint64_t* number) noexcept nogil:
    if cursor.end - cursor.at < nbytes:
        return False
    number[0] = read_big_endian(cursor.at, nbytes)
    cursor.at += nbytes
    return True


cdef inline bint _read_data(Cursor* cursor, Value* value, uint64_t nbytes) noexcept nogil:
    if <uint64_t>(cursor.end - cursor.at) < nbytes:
        return False
    value.data = cursor.at
    value.nbytes = nbytes
    cursor.at += nbytes
    return True


cdef inline bint _read_sized(Cursor* cursor, Value* value, int length_nbytes, bint typed) noexcept nogil:
    """Data behind its length, and behind its type if it is an extension."""
    cdef uint64_t nbytes = 0
    cdef uint64_t type = 0
    if not _read_number(cursor, length_nbytes, &nbytes) or (typed and not _read_number(cursor, 1, &type)):
        return False
    value.type = <uint8_t>type
    return _read_data(cursor, value, nbytes)


cdef inline bint _read_other(Cursor* cursor, Value* value, uint8_t head) noexcept nogil:
    """A value whose head, from 0xC0 to 0xDF, has no number in it."""
    cdef uint64_t type = 0
    if head == 0xC0:
        value.kind = NIL
    elif head == 0xC1:
        return False  # the one byte that msgpack never uses
    elif head in (0xC2, 0xC3):
        value.kind = OTHER
    elif head in (0xC4, 0xC5, 0xC6):
        value.kind = BINARY
        return _read_sized(cursor, value, 1 << (head - 0xC4), False)
    elif head in (0xC7, 0xC8, 0xC9):
        value.kind = EXTENSION
        return _read_sized(cursor, value, 1 << (head - 0xC7), True)
    elif head in (0xCA, 0xCB):
        value.kind = OTHER
        return _read_data(cursor, value, 4 << (head - 0xCA))
    elif head in (0xCC, 0xCD, 0xCE, 0xCF):
        value.kind = UNSIGNED
        return _read_number(cursor, 1 << (head - 0xCC), &value.number)
    elif head in (0xD0, 0xD1, 0xD2, 0xD3):
        value.kind = OTHER
        return _read_data(cursor, value, 1 << (head - 0xD0))
    elif head in (0xD4, 0xD5, 0xD6, 0xD7, 0xD8):
        value.kind = EXTENSION
        if not _read_number(cursor, 1, &type):
            return False
        value.type = <uint8_t>type
        return _read_data(cursor, value, 1 << (head - 0xD4))
    elif head in (0xD9, 0xDA, 0xDB):
        value.kind = TEXT
        return _read_sized(cursor, value, 1 << (head - 0xD9), False)
    elif head in (0xDC, 0xDD):
        value.kind = ARRAY
        return _read_number(cursor, 2 << (head - 0xDC), &value.number)
    else:
        value.kind = MAP
        return _read_number(cursor, 2 << (head - 0xDE), &value.number)
    return True


cdef inline Kind read_value(Cursor* cursor, Value* value) noexcept nogil:
    """Reads the next value, or the head of the next array or map; the cursor stands behind it."""
    cdef uint8_t head
    cdef bint whole = True
    value.kind = TRUNCATED
    if cursor.at >= cursor.end:
        return TRUNCATED
    head = cursor.at[0]
    cursor.at += 1
    if head < 0x80:
        value.kind, value.number = UNSIGNED, head
    elif head < 0x90:
        value.kind, value.number = MAP, head & 0x0F
    elif head < 0xA0:
        value.kind, value.number = ARRAY, head & 0x0F
    elif head < 0xC0:
        value.kind = TEXT
        whole = _read_data(cursor, value, head & 0x1F)
    elif head >= 0xE0:
        value.kind = OTHER
    else:
        whole = _read_other(cursor, value, head)
    if not whole:
        value.kind = TRUNCATED
    return value.kind


cdef inline bint read_unsigned(Cursor* cursor, uint64_t* number) noexcept nogil:
    cdef Value value
    if cursor.at < cursor.end and cursor.at[0] < 0x80:  # most numbers are small
        number[0] = cursor.at[0]
        cursor.at += 1
        return True
    if read_value(cursor, &value) != UNSIGNED:
        return False
    number[0] = value.number
    return True


cdef inline bint read_array(Cursor* cursor, uint64_t* count) noexcept nogil:
    """The head of an array. It can't have more members than there are bytes left, since each member takes one at least."""
    cdef Value value
    if read_value(cursor, &value) != ARRAY or value.number > <uint64_t>(cursor.end - cursor.at):
        return False
    count[0] = value.number
    return True


cdef str text_of(Value* value):
    """Returns a text that was read."""
    try:
        return PyUnicode_DecodeUTF8(<const char*>value.data, value.nbytes, NULL)
    except UnicodeDecodeError as error:
        raise wrong(str(error)) from None


cdef inline uint8_t* put_big_endian(uint8_t* to, uint64_t number, int nbytes) noexcept nogil:
    """The last 1, 2, 4 or 8 bytes of a number."""
    number = be64toh(number << 8 * (8 - nbytes))  # what is put first comes first in memory
    memcpy(to, &number, nbytes)
    return to + nbytes


cdef inline uint8_t* put_little_endian(uint8_t* to, uint64_t number, int nbytes) noexcept nogil:
    """The first bytes of a number."""
    number = le64toh(number)
    memcpy(to, &number, nbytes)
    return to + nbytes


cdef inline uint8_t* put_unsigned(uint8_t* to, uint64_t number) noexcept nogil:
    if number < 0x80:
        to[0] = <uint8_t>number
        return to + 1
    if number < <uint64_t>1 << 32:
        to[0] = 0xCE
        return put_big_endian(to + 1, number, 4)
    to[0] = 0xCF
    return put_big_endian(to + 1, number, 8)


cdef inline uint8_t* put_array(uint8_t* to, uint64_t count) noexcept nogil:
    if count < 16:
        to[0] = <uint8_t>(0x90 | count)
        return to + 1
    if count < 1 << 16:
        to[0] = 0xDC
        return put_big_endian(to + 1, count, 2)
    to[0] = 0xDD
    return put_big_endian(to + 1, count, 4)


cdef inline uint8_t* put_text(uint8_t* to, const void* text, uint64_t nbytes) noexcept nogil:
    """Text of less than 64 KiB."""
    if nbytes < 32:
        to[0] = <uint8_t>(0xA0 | nbytes)
        to += 1
    else:
        to[0] = 0xDA
        to = put_big_endian(to + 1, nbytes, 2)
    memcpy(to, text, nbytes)
    return to + nbytes


cdef inline uint8_t* put_binary_head(uint8_t* to, uint64_t nbytes) noexcept nogil:
    """The head of less than 4 GiB of bytes, which follow."""
    if nbytes < 256:
        to[0] = 0xC4
        to[1] = <uint8_t>nbytes
        return to + 2
    if nbytes < 1 << 16:
        to[0] = 0xC5
        return put_big_endian(to + 1, nbytes, 2)
    to[0] = 0xC6
    return put_big_endian(to + 1, nbytes, 4)


cdef inline uint8_t* put_binary(uint8_t* to, const void* data, uint64_t nbytes) noexcept nogil:
    to = put_binary_head(to, nbytes)
    memcpy(to, data, nbytes)
    return to + nbytes


cdef inline uint8_t* put_nil(uint8_t* to) noexcept nogil:
    to[0] = 0xC0
    return to + 1


cdef inline uint8_t* put_extension_head(uint8_t* to, uint8_t type, uint8_t nbytes) noexcept nogil:
    to[0] = 0xC7
    to[1] = nbytes
    to[2] = type
    return to + 3


cdef inline uint8_t* put_count(uint8_t* to, uint64_t count, uint8_t few, uint8_t many) noexcept nogil:
    """The head of an array or a map of less than 2**32 members, as short as it can be. ``few``, ``many``: its codes."""
    if count < 16:
        to[0] = <uint8_t>(few | count)
        return to + 1
    if count < 1 << 16:
        to[0] = many
        return put_big_endian(to + 1, count, 2)
    to[0] = many + 1
    return put_big_endian(to + 1, count, 4)


cdef inline uint8_t* put_sized_head(uint8_t* to, uint64_t nbytes, uint8_t code) noexcept nogil:
    """The head of less than 4 GiB of bytes or text, as short as it can be. ``code``: that of the shortest."""
    if nbytes < 1 << 8:
        to[0] = code
        to[1] = <uint8_t>nbytes
        return to + 2
    if nbytes < 1 << 16:
        to[0] = code + 1
        return put_big_endian(to + 1, nbytes, 2)
    to[0] = code + 2
    return put_big_endian(to + 1, nbytes, 4)


cdef inline uint8_t* put_int(uint8_t* to, int64_t number) noexcept nogil:
    """A number, as short as it can be."""
    cdef uint64_t bits = <uint64_t>number
    if -32 <= number < 128:
        to[0] = <uint8_t>bits
        return to + 1
    if number >= 0:
        if bits < 1 << 8:
            to[0] = 0xCC
            return put_big_endian(to + 1, bits, 1)
        if bits < 1 << 16:
            to[0] = 0xCD
            return put_big_endian(to + 1, bits, 2)
        if bits < <uint64_t>1 << 32:
            to[0] = 0xCE
            return put_big_endian(to + 1, bits, 4)
        to[0] = 0xCF
        return put_big_endian(to + 1, bits, 8)
    if number >= -(1 << 7):
        to[0] = 0xD0
        return put_big_endian(to + 1, bits, 1)
    if number >= -(1 << 15):
        to[0] = 0xD1
        return put_big_endian(to + 1, bits, 2)
    if number >= -(<int64_t>1 << 31):
        to[0] = 0xD2
        return put_big_endian(to + 1, bits, 4)
    to[0] = 0xD3
    return put_big_endian(to + 1, bits, 8)
