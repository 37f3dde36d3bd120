"""``python -m shmring.frontend.media.decoder_process``: decodes media for :mod:`shmring.frontend.media.decoder_pool`.

Why processes: a thread inside of libav, libwebp or libtiff can't be ended, and one packet or one tile can hold minutes of work.
A process can be killed. It also keeps a crash of those libraries from ending a frontend, what they write to stderr out of its
log, and the interpreter lock free for its event loop.

This program imports the decoders once and then forks a process for each socket that it is sent, which takes milliseconds where
importing takes half a second. It has one thread, so that forking is safe. It ends when the control socket is closed, which the
kernel does for a frontend that is killed; its children are killed when it ends.

malloc stays as it is here, unlike in a frontend: if all large blocks had mappings of their own, their pages would be faulted in
anew for each picture, which took a third of the time of one of 12 megapixels. A decoder keeps up to 64 MB for that.

A child does one job at a time: a message, with the medium's file in a memory file beside it. Pixels and samples go to a second
memory file, and never to the slab: a process that outlives its frontend for a moment could write there after the memory was
given to somebody else.

Pictures may be processed by the image processor of the model, where the engine has named one. It is imported by the program, so
that its children have it, with transformers. If that fails, pixels go to the engine, which processes them itself.

Nothing here imports torch, but for image processors that compute with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import logging
import mmap
import os
import resource
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NoReturn, TypeAlias, cast

import av.logging
import msgspec
import numpy as np

from shmring.engine.inputs import ProcessorSpec, places_of
from shmring.engine.picture_processor import PictureProcessor
from shmring.frontend.media import audio, image, video
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.jobs import MAX_MESSAGE_NBYTES, Decode, Decoded, Failed, Probe, Probed, Ready, Reply
from shmring.frontend.media.options import MediaKind
from shmring.processes.child import end_with_parent, step_back
from shmring.service.logs import log_in_one_thread, stacks_on_signal

__all__ = ["main"]

_MAX_STDERR_NBYTES = 64 << 10  # what libraries may write to stderr about one medium; further writing fails
_MAX_QUOTED = 160  # characters of it that an error quotes


_Header: TypeAlias = image.PictureHeader | audio.SoundHeader | video.ClipHeader
_HEADER_TYPES: dict[MediaKind, type[_Header]] = {
    "image": image.PictureHeader,
    "audio": audio.SoundHeader,
    "video": video.ClipHeader,
}


def main() -> None:
    """Forks a decoder for each socket that arrives on the control socket, whose descriptor is the first argument. The
    second one is the format of its log.

    The message beside it names the image processor that the decoder is to have, if it is not empty.
    """
    # Whoever ends the frontend's process group does not mean us: we end with the frontend.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so the kernel keeps no zombies
    log_in_one_thread("decoder", sys.argv[2])
    warnings.simplefilter("ignore")  # Pillow's, about callers' pictures; what matters becomes an error
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    av.logging.set_level(None)  # libav would write about every damaged packet
    stacks_on_signal()
    gc.freeze()
    control = socket.socket(fileno=int(sys.argv[1]))
    own_pid = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_NBYTES, 1)
        if not message:
            return
        if (processor := msgspec.msgpack.decode(message, type=ProcessorSpec | None)) is not None:
            _processor_of(processor)
            gc.freeze()
        if os.fork() == 0:
            control.close()
            end_with_parent(own_pid)
            _serve(socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])


def _serve(connection: socket.socket) -> NoReturn:
    """Does jobs until the other end is closed."""
    stderr_fd = os.memfd_create("stderr")
    fcntl.fcntl(stderr_fd, fcntl.F_SETFL, os.O_APPEND)
    os.dup2(stderr_fd, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_STDERR_NBYTES, _MAX_STDERR_NBYTES))  # mappings are not subject to it
    step_back()
    jobs = msgspec.msgpack.Decoder(Probe | Decode)
    encode = msgspec.msgpack.Encoder().encode
    connection.send(encode(Ready(os.getpid())))
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_NBYTES, 2)
        if not message:
            os._exit(0)
        os.ftruncate(stderr_fd, 0)
        connection.send(encode(_do(jobs.decode(message), descriptors, stderr_fd)))


def _do(job: Probe | Decode, descriptors: list[int], stderr_fd: int) -> Reply:
    try:
        files = list(map(_mapped, descriptors))
        return _probe(job, files[0]) if isinstance(job, Probe) else _decode(job, files[0], files[1])
    except MediaError as error:
        return Failed(str(error) + _quoted(stderr_fd), expected=True)
    except Exception:  # noqa: BLE001 - the frontend reports it
        return Failed(traceback.format_exc(), expected=False)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _mapped(descriptor: int) -> mmap.mmap | bytes:
    return mmap.mmap(descriptor, 0) if os.fstat(descriptor).st_size else b""


def _quoted(stderr_fd: int) -> str:
    """The first line that a library wrote to stderr about the medium, such as libtiff's reason."""
    lines = os.pread(stderr_fd, _MAX_QUOTED, 0).decode("ascii", "replace").splitlines()
    line = "".join(filter(str.isprintable, lines[0])).strip() if lines else ""
    return f" ({line})" if line else ""


def _probe(job: Probe, file: mmap.mmap | bytes) -> Probed:
    spec, limits = job.spec, job.limits
    data = _data(job, file)
    header: _Header
    features_nbytes = 0
    if job.kind == "image" and spec.picture is not None:
        header = image.probe(data, limits, spec.picture.max_pixels)
        if (processor := _processor_of(spec.picture.processor)) is not None:
            with _refusals():
                _, features_nbytes = places_of(processor.foresee(header.height, header.width))
    elif job.kind == "audio" and spec.sound is not None:
        header = audio.probe(data, spec.sound, limits)
    elif job.kind == "video" and spec.video is not None:
        header = video.probe(data, spec.video, limits, job.io_kwargs)
    else:
        raise ValueError(f"a medium of kind {job.kind} was sent that the executor does not take")
    return Probed(header.shape, msgspec.msgpack.encode(header, enc_hook=str), features_nbytes)


def _data(job: Probe | Decode, file: mmap.mmap | bytes) -> bytes:
    """A picture's file is copied, since Pillow would do that twice. Clips are large, and libav reads them as they are."""
    return bytes(file) if job.kind == "image" else cast("bytes", file)


def _decode(job: Decode, file: mmap.mmap | bytes, memory: mmap.mmap | bytes) -> Decoded:
    data = _data(job, file)
    header: _Header = msgspec.msgpack.decode(job.header, type=_HEADER_TYPES[job.kind], dec_hook=_fraction)
    if isinstance(header, image.PictureHeader):
        background = job.io_kwargs.rgba_background_color
        processor = _processor_of(job.processor)
        # What is made of pixels may be the pixels themselves, so they must not lie where it is written.
        pixels = np.ndarray(header.shape, np.uint8, memory if processor is None else None)
        shortfall = image.decode_into(data, header, pixels, background)
        if processor is None:
            return Decoded(header.height, shortfall=shortfall)
        with _refusals():
            layout = processor.process_into(pixels, memory)
        if layout:
            return Decoded(places_of(layout)[1], shortfall=shortfall, layout=layout)
        np.ndarray(header.shape, np.uint8, memory)[:] = pixels
        return Decoded(header.height, shortfall=shortfall)
    if isinstance(header, video.ClipHeader):
        clip = video.decode_into(data, header, np.ndarray(header.shape, np.uint8, memory), job.io_kwargs.rgba_background_color)
        return Decoded(len(clip.timestamps_s), clip.duration_s, timestamps_s=clip.timestamps_s, shortfall=clip.shortfall)
    sound = audio.decode_into(data, header, np.ndarray(header.shape, np.float32, memory))
    return Decoded(sound.length, sound.duration_s, header.sample_rate, shortfall=sound.shortfall)


@functools.lru_cache(maxsize=2)  # one, and none
def _processor_of(spec: ProcessorSpec | None) -> PictureProcessor | None:
    """Returns an image processor; None if there is none, or it can't be made here."""
    if spec is None:
        return None
    try:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        if not spec.needs_torch:
            sys.modules.setdefault("torch", None)  # type: ignore[arg-type] # as if it were not installed
        return PictureProcessor(spec)
    except Exception as error:  # noqa: BLE001 - whatever a library raises that is not installed as it should be
        logging.getLogger(__name__).warning("pictures are processed in the engine, not in decoders: %s", error)
        return None


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What an image processor does not take is the picture's fault."""
    try:
        yield
    except ValueError as error:
        raise MediaError(f"the model does not take the picture: {error}") from error


def _fraction(expected_type: type, text: Any) -> Fraction:
    """The one type in headers that msgspec does not know; ``str`` wrote it."""
    assert expected_type is Fraction, expected_type
    return Fraction(text)


if __name__ == "__main__":
    main()
