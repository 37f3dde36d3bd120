"""Where a server listens: files of Unix sockets, and certificates."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import uvloop

from shmring.frontend.http.listening import check_tls, listen, place_of, repeated, url_of
from shmring.frontend.processes import supervisor
from shmring.frontend.processes.supervisor import ServeError
from shmring.frontend.settings import ProcessSettings, TlsSettings

ROOT = Path(__file__).resolve().parents[3]
TLS = TlsSettings(certfile="certificate.pem")


def at(path: Path) -> ProcessSettings:
    return ProcessSettings(uds=str(path))


def is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_addresses_are_shown_as_what_they_are(tmp_path: Path) -> None:
    with listen(ProcessSettings(port=0)) as listening:
        port = listening.getsockname()[1]
        assert url_of(listening, None) == f"http://127.0.0.1:{port}"
        assert url_of(listening, TLS) == f"https://127.0.0.1:{port}"
    with listen(at(tmp_path / "s")) as listening:
        assert url_of(listening, None) == url_of(listening, TLS) == f"unix:{tmp_path}/s"
    assert place_of(ProcessSettings(port=5)) == "127.0.0.1 port 5"
    assert place_of(at(tmp_path)) == str(tmp_path)


def test_a_socket_has_a_file_as_long_as_somebody_listens(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listen(at(path)) as listening:
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        assert is_answered(path)
        assert not os.get_inheritable(listening.fileno())
    assert list(tmp_path.iterdir()) == []
    listening.close()


def test_several_connections_are_accepted_in_one_turn_of_a_loop() -> None:
    accepted: list[asyncio.BaseTransport] = []

    class Accepting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.append(transport)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with listen(ProcessSettings(port=0)) as listening:
            servers = [await loop.create_server(Accepting, sock=each) for each in repeated(listening)]
            callers = [socket.create_connection(listening.getsockname()) for _ in range(8)]
            for _ in range(4):  # libuv alone would have accepted four by then
                await asyncio.sleep(0)
            assert len(accepted) == 8
            for closing in (*accepted, *callers, *servers):
                closing.close()

    uvloop.run(run())


def test_what_a_killed_server_left_blocks_nobody(tmp_path: Path, run_python: Any) -> None:
    path = tmp_path / "s"
    program = (
        "import time; from shmring.frontend.http.listening import listen\n"
        "from shmring.frontend.settings import ProcessSettings\n"
        f"listening = listen(ProcessSettings(uds={str(path)!r})); print('listens', flush=True); time.sleep(600)"
    )
    server = run_python("-c", program)
    assert server.line() == "listens"
    with pytest.raises(ServeError, match=rf"can't listen on {path}: Address already in use"):
        supervisor._listen(at(path))
    assert is_answered(path), "it was left alone"
    server.kill()
    assert path.exists()
    with listen(at(path)):
        assert is_answered(path)
    assert not path.exists()


def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ServeError, match=r"can't listen on .*: there is a file that is no socket"):
        supervisor._listen(at(path))
    assert path.read_text() == "precious"


@pytest.mark.parametrize(("name", "reason"), [("x" * 200, "too long"), ("nowhere/s", "No such file or directory")])
def test_a_path_that_can_not_be_is_one_clear_message(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ServeError, match=rf"can't listen on .*: .*{reason}"):
        supervisor._listen(at(tmp_path / name))
    assert list(tmp_path.iterdir()) == []


# -- certificates -------------------------------------------------------------------------------------------------------


def test_a_certificate_and_its_key_can_be_used(certificate: tuple[Path, Path]) -> None:
    certfile, keyfile = map(str, certificate)
    check_tls(TlsSettings(certfile=certfile, keyfile=keyfile))
    check_tls(TlsSettings(certfile=certfile, keyfile=keyfile, ca_certs=certfile, cert_reqs=2))


def test_what_can_not_be_used_is_named(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    certfile, keyfile = map(str, certificate)
    (tmp_path / "empty.pem").touch()
    for tls, reason in (
        (TlsSettings(certfile=keyfile, keyfile=keyfile), r"--ssl-certfile .*key\.pem and --ssl-keyfile .* can't be used"),
        (TlsSettings(certfile=certfile), r"--ssl-certfile .* can't be used"),
        (TlsSettings(certfile="/nowhere", keyfile=keyfile), r"--ssl-certfile /nowhere .* can't be used: No such file"),
        (TlsSettings(certfile=certfile, keyfile=keyfile, ca_certs=str(tmp_path / "empty.pem")), r"--ssl-ca-certs .*empty\.pem"),
        (TlsSettings(certfile=certfile, keyfile=keyfile, cert_reqs=2), "--ssl-cert-reqs asks .* --ssl-ca-certs must say"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_tls(tls)


def test_nobody_is_asked_for_the_password_of_a_key(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    encrypted = tmp_path / "encrypted.pem"
    command = ("openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", str(certificate[1]), "-out", str(encrypted))
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ValueError, match="is encrypted; give one that is not"):
        check_tls(TlsSettings(certfile=str(certificate[0]), keyfile=str(encrypted)))
