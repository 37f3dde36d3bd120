"""Writes numbered records of many lengths into a message ring, as fast as its reader takes them."""

from __future__ import annotations

import mmap
import select
import socket
import struct
import sys

from shmring.core.compiled import RecordWriter, ring_nbytes


def main(fd: int, bell: int, capacity: int, count: int) -> None:
    memory = mmap.mmap(fd, ring_nbytes(capacity))
    with socket.socket(fileno=bell) as sock:
        writer = RecordWriter(memory, sock.fileno())
        for number in range(count):
            length = 8 + number * 7 % (writer.largest_record_nbytes - 7)
            record = struct.pack("<Q", number) + bytes([number % 251]) * (length - 8)
            while not writer.write(record):
                writer.ring_bell()
                if writer.wait_for_space(len(record)):
                    assert select.select([sock], [], [], 30)[0], "nobody rang for 30 s"
                    if not sock.recv(4096):
                        return
            if number % 5 == 0:
                writer.ring_bell()
        writer.ring_bell()


main(*map(int, sys.argv[1:]))
