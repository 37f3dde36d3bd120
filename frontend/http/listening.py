"""Where a server listens: at a port, or at a Unix socket; and the check of its certificate.

A Unix socket has a file. It is removed before the socket is closed: while this process listens, no other server takes the path,
so the file is ours. A killed server leaves the file, and the next server at that path removes it, because no process listens
there. If two servers start at a time, they check one after the other: each locks the directory meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from typing import NoReturn

from shmring.frontend.settings import ProcessSettings, TlsSettings

__all__ = ["UnixListener", "check_tls", "listen", "place_of", "repeated", "url_of"]

_BACKLOG = 2048  # connections that wait to be accepted; the kernel caps it (net.core.somaxconn)
_ACCEPTED_IN_TURN = 8
_MODE = 0o666  # open to all users who may enter the directory, as a port is open to all users


class UnixListener(socket.socket):
    """A socket that listens at a path, and removes its file when it is closed."""

    def close(self) -> None:
        """Removes the file, and closes the socket. A second call does nothing."""
        if self.fileno() >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.getsockname())
        super().close()


def listen(settings: ProcessSettings) -> socket.socket:
    """Returns a socket that listens where the settings say. The caller closes it.

    Raises:
        OSError: another process listens there, or the address can't be used.
    """
    if settings.uds is not None:
        return _listen_at_path(os.path.abspath(settings.uds))
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)  # sets SO_REUSEADDR
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # Python adds the address, which is said anyway
        if error.errno == errno.EADDRINUSE:
            why += "; stop the program that listens there, or choose another --port"
        raise OSError(error.errno, why) from None


def repeated(listening: socket.socket) -> list[socket.socket]:
    """Returns a socket that listens several times over: uvloop's libuv accepts one connection from each in a turn of the loop.

    Under load a turn takes milliseconds. So a thousand connections of one caller would keep another one waiting for seconds.
    """
    return [listening, *(socket.socket(fileno=os.dup(listening.fileno())) for _ in range(_ACCEPTED_IN_TURN - 1))]


def place_of(settings: ProcessSettings) -> str:
    """Says where that is, for errors."""
    return f"{settings.host} port {settings.port}" if settings.uds is None else settings.uds


def url_of(listening: socket.socket, tls: TlsSettings | None) -> str:
    """Returns the address of a socket that listens."""
    if listening.family == socket.AF_UNIX:
        return f"unix:{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    return f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"


def _listen_at_path(path: str) -> UnixListener:
    with _locked(os.path.dirname(path)):
        _remove_what_is_dead(path)
        listener = UnixListener(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            os.chmod(path, _MODE)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    return listener


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_what_is_dead(path: str) -> None:
    """Removes the file of a socket at which no process listens any more.

    Raises:
        OSError: a process listens there, or it is another kind of file.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    os.unlink(path)


def check_tls(tls: TlsSettings) -> None:
    """Looks whether the files of certificates and keys can be used, before a process is started.

    Raises:
        ValueError: one can't; the text says which.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certfile, tls.keyfile, password=_refuse_to_ask)
    except OSError as error:  # ssl.SSLError is one
        key = "" if tls.keyfile is None else f" and --ssl-keyfile {tls.keyfile}"
        is_content = isinstance(error, ssl.SSLError)
        advice = "; they must be PEM: the certificate, and its key there or in --ssl-keyfile" if is_content else ""
        raise ValueError(f"--ssl-certfile {tls.certfile}{key} can't be used: {error.strerror or error}{advice}") from None
    if tls.ca_certs is not None:
        try:
            context.load_verify_locations(tls.ca_certs)
        except OSError as error:
            raise ValueError(f"--ssl-ca-certs {tls.ca_certs} can't be used: {error.strerror or error}") from None
    elif tls.cert_reqs:
        raise ValueError("--ssl-cert-reqs asks callers for certificates; --ssl-ca-certs must say whose are accepted")


def _refuse_to_ask() -> NoReturn:
    raise ValueError("the key of --ssl-keyfile is encrypted; give one that is not, in a file that only you can read")
