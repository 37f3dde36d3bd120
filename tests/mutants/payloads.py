"""Faults in what crosses: encoding payloads, checking what came, and decoding it."""

from __future__ import annotations

from tests.faulty import faults_in

FAULTS = (
    *faults_in(
        "shmring/core/payload.pyx",
        (
            "tensors are not aligned to lines of the cache",
            "return (nbytes + _LINE_NBYTES - 1) & ~<uint64_t>(_LINE_NBYTES - 1)",
            "return nbytes",
            "tests/memory/test_payload.py::test_any_payload_arrives_as_it_was_sent",
        ),
        (
            "what was encoded is lost where it grows",
            "    if not out.is_on_heap:\n        memcpy(larger, out.start, used)\n",
            "",
            "tests/memory/test_payload.py",
        ),
        (
            "an int that is larger than 63 bits is cut off",
            "if overflow:\n            return self._put_foreign(out, value)",
            "if False:\n            return self._put_foreign(out, value)",
            "tests/memory/test_codec.py",
        ),
        (
            "what lay in the ring between tensors is sent",
            "memset(region + end, 0, part.offset - end)",
            "pass",
            "tests/memory/test_payload.py",
        ),
        (
            "a payload that is packed inside of another ends that",
            "self._packed, self._held = outer, outer_held",
            "self._packed, self._held = None, None",
            "tests/memory/test_payload.py",
        ),
        (
            "a dict that changes while it is encoded is sent as it is then",
            'if left:\n            raise TypeError("a dict',
            'if False:\n            raise TypeError("a dict',
            "tests/memory/test_payload.py",
        ),
        (
            "what lies between tensors does not count as theirs",
            "packed.region_nbytes = part.offset + part.nbytes",
            "packed.region_nbytes += part.nbytes",
            "tests/memory/test_payload.py",
        ),
        (
            "a payload that fits a record is sent in one, whatever else is in that",
            "elif record_nbytes + payload_nbytes <= largest_record_nbytes",
            "elif payload_nbytes <= largest_record_nbytes",
            "tests/memory/test_payload.py",
        ),
        (
            "each generation in an end takes five bytes",
            "nbytes += unsigned_nbytes(released[i])",
            "nbytes += 5",
            "tests/core/test_wire.py",
        ),
        (
            "a tensor that is not contiguous is sent as it lies",
            "described.strides[i] != stride and described.shape[i] > 1",
            "False",
            "tests/memory/test_payload.py",
        ),
        (
            "a tensor that is to be conjugated is sent as it lies",
            "if is_plain and (described.dtype.code != _COMPLEX or not tensor.is_conj())",
            "if is_plain",
            "tests/memory/test_payload.py",
        ),
        (
            "as many tensors as are accepted are refused",
            "if count > self._max_tensors",
            "if count >= self._max_tensors",
            "tests/memory/test_payload.py",
        ),
    ),
    *faults_in(
        "shmring/core/msgpack.pxd",
        (
            "data may end behind the bytes that are left",
            "if <uint64_t>(cursor.end - cursor.at) < nbytes",
            "if False",
            "tests/core/test_wire.py",
        ),
        (
            "a number may end one byte behind those that are left",
            "if cursor.end - cursor.at < nbytes",
            "if cursor.end - cursor.at < nbytes - 1",
            "tests/core/test_wire.py",
        ),
        (
            "the smallest number of a byte takes two",
            "if number >= -(1 << 7)",
            "if number > -(1 << 7)",
            "tests/memory/test_codec.py",
        ),
        (
            "a number is counted as shorter than it is written",
            "return 1 if number < 0x80 else 5 if number < <uint64_t>1 << 32 else 9",
            "return 1 if number <= 0x80 else 5 if number < <uint64_t>1 << 32 else 9",
            "tests/core/test_wire.py",
        ),
        (
            "a short text that is as long as it can be has another head",
            "if nbytes < 32:\n        to[0]",
            "if nbytes <= 32:\n        to[0]",
            "tests/core/test_wire.py",
        ),
        (
            "bytes come in the other order",
            "    for i in range(nbytes):\n        number = number << 8 | at[i]\n",
            "    for i in range(nbytes - 1, -1, -1):\n        number = number << 8 | at[i]\n",
            "tests/core/test_wire.py",
        ),
        (
            "an array may have more members than there are bytes",
            "if read_value(cursor, &value) != ARRAY or value.number > <uint64_t>(cursor.end - cursor.at)",
            "if read_value(cursor, &value) != ARRAY",
            "tests/core/test_wire.py",
        ),
    ),
    *faults_in(
        "shmring/core/slot_header.pxd",
        (
            "a header needs no magic",
            "return not memcmp(header, magic, MAGIC_NBYTES)",
            "return True",
            "tests/integration/test_forged.py",
        ),
        (
            "a header's generation stands where its size does",
            "memcpy(at + 8, &slot.generation, 8)",
            "memcpy(at + 16, &slot.generation, 8)",
            "tests/test_ring.py",
        ),
    ),
    *faults_in(
        "shmring/core/wire.pyx",
        (
            "a tensor's shape may lie behind its extension",
            "nbytes < TENSOR_HEAD_NBYTES + shape_nbytes",
            "False",
            "tests/core/test_wire.py",
        ),
        (
            "the bytes of a shape may overflow",
            "if multiply_overflows(bound, extent or 1, &bound) or bound >= _MAX_NUMBER",
            "if False",
            "tests/core/test_wire.py",
        ),
        (
            "a tensor need not be aligned to its items",
            "if tensor.dtype and tensor.offset % item",
            "if False",
            "tests/core/test_wire.py",
        ),
        (
            "a tensor may name the slot of copied bytes as one of the others",
            "if tensor.region > content.slot_count - content.is_copied_to_slot:",
            "if tensor.region > content.slot_count:",
            "tests/core/test_wire.py",
        ),
        (
            "a payload is nested by one more than there is room to count",
            "if depth == _MAX_DEPTH",
            "if depth > _MAX_DEPTH",
            "tests/core/test_wire.py",
        ),
        (
            "as many tensors as may be are refused",
            "if tensors[0] > max_tensors",
            "if tensors[0] >= max_tensors",
            "tests/core/test_wire.py",
        ),
        (
            "a third slot has no room",
            "if count > 2",
            "if count > 3",
            "tests/core/test_wire.py",
        ),
        (
            "a slot's numbers may be so large that their sum overflows",
            "slot.offset > _MAX_NUMBER or slot.nbytes > _MAX_NUMBER",
            "False",
            "tests/core/test_wire.py",
        ),
        (
            "a payload may begin in its slot and end behind it",
            "content.payload_nbytes > slot_nbytes - content.payload_offset",
            "False",
            "tests/core/test_wire.py",
        ),
        (
            "an end may list any number of generations",
            "if count[0] > MAX_LISTED",
            "if False",
            "tests/core/test_wire.py",
        ),
        (
            "a request may have any number",
            "submit.request_id > _MAX_NUMBER",
            "False",
            "tests/core/test_wire.py",
        ),
        (
            "a map has as many members as pairs",
            "left[depth] = value.number << (kind == MAP)",
            "left[depth] = value.number",
            "tests/core/test_wire.py",
        ),
    ),
    *faults_in(
        "shmring/core/received.pyx",
        (
            "a decoder that its own hook enters again has no regions afterwards",
            "self._content_regions, self._place = outer, outer_place",
            "self._content_regions, self._place = None, None",
            "tests/core/test_received.py",
        ),
        (
            "an array is made of as many members as it says",
            "if count > <uint64_t>(cursor.end - cursor.at)",
            "if False",
            "tests/core/test_received.py",
        ),
        (
            "the list of many regions is never freed",
            "        if self._slots != self._few:\n            free(self._slots)",
            "        pass",
            "tests/core/test_received.py",
        ),
        (
            "a slot that was left is left again",
            "        self._slots[slot] = NULL\n",
            "",
            "tests/core/test_received.py",
        ),
        (
            "a key that is kept is not held",
            "            Py_INCREF(key)\n            Py_XDECREF(known[0])\n",
            "            Py_XDECREF(known[0])\n",
            "tests/core/test_received.py",
        ),
        (
            "a key that others push out is never let go",
            "            Py_INCREF(key)\n            Py_XDECREF(known[0])\n",
            "            Py_INCREF(key)\n",
            "tests/core/test_received.py",
        ),
        (
            "a copy of a slot begins with its header",
            "copy_region(self._mapping.mapped.address + numbers.offset + _SLOT_HEADER_NBYTES, numbers.nbytes)",
            "copy_region(self._mapping.mapped.address + numbers.offset, numbers.nbytes)",
            "tests/core/test_received.py",
        ),
        (
            "a negative number of two bytes is a positive one",
            "return <int64_t><int16_t>bits",
            "return <int64_t>bits",
            "tests/memory/test_codec.py",
        ),
        (
            "a reply that was copied out may be a view of its slot",
            "if self.is_copied_out:",
            "if False:",
            "tests/core/test_received.py",
        ),
    ),
    *faults_in(
        "shmring/core/kept_content.pyx",
        (
            "content may begin in the slab and end behind it",
            "found.offset + found.nbytes + BLOCK_NBYTES > mapping.mapped.nbytes",
            "found.offset > mapping.mapped.nbytes",
            "tests/test_kept.py",
        ),
        (
            "content that was copied to its slot counts as written in place",
            "content.is_copied_to_slot = is_copied",
            "content.is_copied_to_slot = False",
            "tests/test_kept.py::test_what_does_not_lie_in_one_slot_is_copied_to_one",
        ),
        (
            "kept content has the blocks of its bytes without a header",
            "record.blocks = slot_blocks(record.nbytes)",
            "record.blocks = record.nbytes // BLOCK_NBYTES",
            "tests/test_kept.py",
        ),
    ),
)
