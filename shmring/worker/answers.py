"""The records that a worker sends beside its acknowledgements: replies, whole or in parts, and failures."""

from __future__ import annotations

from collections.abc import Iterator

from shmring.core.messages import AnswerFailed, AnswerPart, encode_message

__all__ = ["failure_record", "records_of"]

_PART_NBYTES = 16  # of a part's record around its data, at most
_MAX_ERROR_TEXT = 1024  # characters of an exception's text that travel


def records_of(record: bytes, largest_nbytes: int) -> Iterator[bytes]:
    """Cuts a record that is longer than a record may be into parts.

    Args:
        record: of any length.
        largest_nbytes: of one record.
    """
    if len(record) <= largest_nbytes:
        yield record
        return
    step = largest_nbytes - _PART_NBYTES
    for start in range(0, len(record), step):
        yield encode_message(AnswerPart(record[start : start + step], start + step < len(record)))


def failure_record(sequence: int, error: BaseException) -> bytes:
    """Returns the record that says why there is no reply to a message."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001 - the engine waits, whatever the error's own code does
        text = f"its text can't be had: {type(failure).__name__}"
    text = text[:_MAX_ERROR_TEXT].encode(errors="replace").decode()  # file names can hold bytes that are no text
    return encode_message(AnswerFailed(sequence, type(error).__name__[:256], text))
