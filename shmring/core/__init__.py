"""The rules of the transport, without any I/O: no asyncio, no os, no mmap, no torch, no clock."""
