"""What the doctor says of machines of every kind: each check is given what such a machine would show."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from shmring.frontend.cli import main
from shmring.frontend.commands import doctor
from shmring.frontend.commands.doctor import Check
from shmring.frontend.commands.serve import options_of_words
from shmring.frontend.processes import memory_checks
from shmring.memory.slab import NAME_PREFIX
from shmring.transport.listener import Listener
from tests.tables import for_each

MIB, GIB = 1 << 20, 1 << 30
NEEDS = {"slabs": GIB, "processes": GIB // 2, "bodies": 0, "decoded media": GIB // 2}
SHM = Path("/dev/shm")


def filesystem(blocks: int, free: int, files: int = 1000, free_files: int = 900) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, blocks, free, free, files, free_files, free_files, 0, 255))


# -- the whole ------------------------------------------------------------------------------------------------------------


def test_this_machine_passes_and_the_self_test_is_timed() -> None:
    checks = {check.name: check for check in doctor.run_checks(options_of_words(["--slab-nbytes=8MiB"]))}
    assert not doctor.has_problem(list(checks.values())), checks
    assert "us (median)" in checks["self-test"].finding
    assert checks["torch"].finding.startswith("2.")


def doctored(*arguments: str) -> tuple[int, dict[str, Check], str]:
    """The exit code of the command, its checks by name, and what it says beside them."""
    result = CliRunner().invoke(main, ["doctor", "--json", *arguments])
    return result.exit_code, {each.name: each for each in msgspec.json.decode(result.stdout, type=list[Check])}, result.stderr


def test_the_command_prints_json_and_fails_for_a_problem() -> None:
    exit_code, checks, _ = doctored("--slab-nbytes=4000GiB")
    assert (exit_code, checks["memory"].status, checks["self-test"].status) == (1, "problem", "ok")
    assert "--shm-size" in checks["/dev/shm space"].advice


def test_several_engines_need_room_for_their_slabs_together() -> None:
    for nbytes, more in (("8 MiB", []), ("32 MiB", ["--data-parallel-size=4"])):
        checks = doctored("--slab-nbytes=8MiB", *more)[1]
        assert f"slabs take {nbytes}" in checks["/dev/shm space"].finding
        assert f"(slabs {nbytes}, processes" in checks["memory"].finding


def test_the_memory_that_a_server_takes_is_what_its_options_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(*words: str) -> dict[str, int]:
        return options_of_words(["--slab-nbytes=16MiB", *words]).memory_needs()

    def more(*words: str) -> dict[str, int]:
        return {what: nbytes - usual[what] for what, nbytes in needs(*words).items() if nbytes != usual[what]}

    monkeypatch.setattr(memory_checks, "count_gpus", lambda: 0)
    usual, each = needs(), memory_checks._FRONTEND_NBYTES + 4 * memory_checks._DECODER_NBYTES
    assert more("-dp", "3") == {"slabs": 32 * MIB, "processes": 2 * memory_checks._ENGINE_NBYTES}
    assert more("--api-server-count=3") == {"processes": each, "bodies": 256 * MIB, "decoded media": 256 * MIB}
    assert more("--decoders=5") == {"processes": 2 * memory_checks._DECODER_NBYTES}
    assert more("--max-bodies-nbytes=257MiB", "--max-decoded-nbytes=1GiB") == {"bodies": 2 * MIB, "decoded media": 1536 * MIB}
    assert more("--response-store-nbytes=65MiB") == {"responses": MIB}
    assert more("--response-lifetime=0") == {"responses": -64 * MIB}
    for file in ("model-1.safetensors", "model-2.safetensors", "tokenizer.json"):
        (tmp_path / file).write_bytes(bytes(MIB))
    (tmp_path / "model-3.safetensors").symlink_to("gone")  # its engine says so
    served = (f"--model={tmp_path}", "--executor=json:Executor", "--data-parallel-size=2")
    assert more(*served)["models"] == 4 * MIB
    assert "models" not in more("--model=~nobody-of-this-name/model", "--executor=json:Executor")
    monkeypatch.setattr(memory_checks, "count_gpus", lambda: 1)
    assert "models" not in more(*served), "it is in the memory of the GPU"


def test_the_command_refuses_what_is_no_size() -> None:
    result = CliRunner().invoke(main, ["doctor", "--slab-nbytes=much"])
    assert result.exit_code == 2
    assert "'much' is not a size" in result.output


def test_the_table_shows_everything_as_it_is() -> None:
    console = Console(file=StringIO(), width=100)
    doctor.show([Check("huge pages", "warning", "always [never]", "echo [bold]")], console)
    written = console.file.getvalue()  # type: ignore[attr-defined] # it is a StringIO
    for text in ("huge pages", "warning", "always [never]", "echo [bold]"):
        assert text in written


def test_a_problem_is_what_decides() -> None:
    assert not doctor.has_problem([Check("a", "ok", ""), Check("b", "warning", "")])
    assert doctor.has_problem([Check("a", "ok", ""), Check("b", "problem", "")])


# -- the kernel and its memory ------------------------------------------------------------------------------------------


@for_each(
    ("release", "status"),
    [
        *((release, "ok") for release in ("6.18.44-fc", "5.10.0-21-amd64", "5.3.0")),
        *((release, "problem") for release in ("5.2.21", "4.19", "?")),
    ],
)
def test_kernels(release: str, status: str) -> None:
    assert doctor.check_kernel(release).status == status


@for_each(
    ("mounts", "status", "finding"),
    [
        ("tmpfs /dev/shm tmpfs rw,nosuid,noexec,size=65536k 0 0\n", "ok", "tmpfs (rw,nosuid,noexec,size=65536k)"),
        ("shm /dev/shm tmpfs rw 0 0\n/dev/sda /dev/shm ext4 rw 0 0\n", "problem", "ext4 (rw)"),
        ("tmpfs /dev/shm tmpfs ro,relatime 0 0\n", "warning", f"tmpfs (ro,relatime); {doctor._IN_A_MEMFD}"),
        ("tmpfs /dev/shm/below tmpfs rw 0 0\n", "problem", "nothing is mounted there"),
        ("/dev/sda / ext4 rw 0 0\ntmpfs /dev tmpfs rw,mode=755 0 0\nproc /proc proc rw 0 0\n", "ok", "tmpfs (rw,mode=755)"),
        ("tmpfs /dev/shm/below tmpfs rw 0 0\n/dev/sda / ext4 rw 0 0\n", "problem", "ext4 (rw)"),
        ("", "problem", "nothing is mounted there"),
    ],
)
def test_mounts(mounts: str, status: str, finding: str) -> None:
    check = doctor.check_shm_mount(mounts, SHM)
    assert (check.status, check.finding) == (status, finding)


@for_each(
    ("space", "status", "finding", "advice"),
    [
        (filesystem(16384, 16384), "ok", f"64 MiB of 64 MiB are free; slabs take 1 GiB; {doctor._IN_A_MEMFD}", "--shm-size"),
        (filesystem(GIB // 4096, 10), "ok", "", "remove what fills /dev/shm"),
        (filesystem(GIB // 4096, GIB // 4096), "ok", "", ""),
        (filesystem(0, 0), "ok", "not limited", ""),
        (None, "warning", "", ""),
    ],
    ids=["docker's 64 MB", "full", "large enough", "without a limit", "unknown"],
)
def test_space_in_shared_memory(space: os.statvfs_result | None, status: str, finding: str, advice: str) -> None:
    check = doctor.check_shm_space(space, GIB)
    assert check.status == status
    assert finding in (check.finding, "")
    assert advice in check.advice


@for_each(("files", "free", "status"), [(1000, 900, "ok"), (1000, 3, "warning"), (0, 0, "ok")])
def test_inodes(files: int, free: int, status: str) -> None:
    assert doctor.check_shm_inodes(filesystem(10, 10, files, free)).status == status


@for_each(("available_kib", "status"), [(2 << 20, "ok"), ((2 << 20) - 1, "warning"), (1 << 20, "warning"), (524288, "problem")])
def test_memory(available_kib: int, status: str) -> None:
    meminfo = f"MemTotal:       16777216 kB\nMemFree:         1 kB\nMemAvailable:   {available_kib} kB\nHugePages_Total:   0\n"
    check = memory_checks.check_memory(meminfo, NEEDS)
    assert check.status == status
    assert "of 16 GiB are available" in check.finding
    assert bool(check.advice) == (status != "ok")
    assert memory_checks.check_memory("", NEEDS).status == "warning", "it can't be seen"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_smallest_limit_of_all_groups_above_us_counts(tmp_path: Path) -> None:
    membership = write(tmp_path / "cgroup", "0::/pod/container/init\n")
    root = tmp_path / "fs"
    write(root / "memory.max", "1\n").rename(tmp_path / "memory.max")  # beyond the root, nothing is looked at
    write(root / "pod" / "container" / "memory.max", f"{8 * GIB}\n")
    write(root / "pod" / "container" / "init" / "memory.max", "max\n")
    for nbytes, status in ((2 * GIB, "ok"), (2 * GIB - 1, "warning"), (GIB // 2, "problem")):
        write(root / "pod" / "memory.max", f"{nbytes}\n")
        check = memory_checks.check_cgroup(membership, root, NEEDS)
        assert check.status == status
    taken = "a server takes 2 GiB (slabs 1 GiB, processes 512 MiB, decoded media 512 MiB)"
    assert check.finding == f"limited to 512 MiB by {root}/pod/memory.max; {taken}"
    assert "--memory=" in check.advice
    assert memory_checks.check_cgroup(tmp_path / "none", tmp_path, NEEDS).status == "ok", "there are no groups"


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    membership = write(tmp_path / "cgroup", "5:cpu,cpuacct:/a\n4:memory:/docker/x\n1:name=systemd:/\n")
    limit = write(tmp_path / "fs" / "memory" / "docker" / "x" / "memory.limit_in_bytes", f"{GIB // 4}\n")
    assert memory_checks.check_cgroup(membership, tmp_path / "fs", NEEDS).status == "problem"
    limit.write_text("9223372036854771712\n")  # what it says instead of "max"
    assert memory_checks.check_cgroup(membership, tmp_path / "fs", NEEDS).finding == "not limited"


def test_processes_that_the_kernel_killed_for_lack_of_memory(tmp_path: Path) -> None:
    membership, root, vmstat = tmp_path / "cgroup", tmp_path / "fs", tmp_path / "vmstat"
    assert memory_checks.oom_kills(membership, root, vmstat) == 0
    write(vmstat, "pgfault 5\noom_kill 7\n")
    assert memory_checks.oom_kills(membership, root, vmstat) == 7
    write(membership, "4:memory:/a\n")
    write(root / "memory" / "a" / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert memory_checks.oom_kills(membership, root, vmstat) == 2
    write(membership, "0::/pod\n")
    write(root / "pod" / "memory.events", "oom 5\noom_kill 3\noom_group_kill 0\n")
    assert memory_checks.oom_kills(membership, root, vmstat) == 3
    assert "somebody else has, or the kernel" in memory_checks.describe_kill(3, membership, root)
    assert "the machine had no more memory" in memory_checks.describe_kill(2, membership, root)
    limit = write(root / "pod" / "memory.max", f"{GIB}\n")
    assert f"of which {limit} allows 1 GiB; raise that" in memory_checks.describe_kill(2, membership, root)


@for_each("can_be_had", [False, True])
def test_huge_pages_are_never_a_problem(can_be_had: bool) -> None:
    check = doctor.check_huge_pages(can_be_had)
    assert check.status == "ok"
    assert bool(check.advice) != can_be_had


# -- limits -------------------------------------------------------------------------------------------------------------


@for_each(
    ("limit", "cuda", "status"),
    [(8 << 20, False, "ok"), (8 << 20, True, "warning"), (2 * GIB, True, "ok"), (resource.RLIM_INFINITY, True, "ok")],
)
def test_locked_memory_matters_with_a_gpu(limit: int, cuda: bool, status: str) -> None:
    assert doctor.check_memlock(limit, GIB, cuda=cuda).status == status


@for_each(("limit", "status"), [(64, "problem"), (256, "warning"), (1024, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_open_files(limit: int, status: str) -> None:
    check = doctor.check_open_files(limit)
    assert (check.status, "ulimit -n" in check.advice) == (status, status != "ok")


# -- what frontends and engine know each other by -----------------------------------------------------------------------


def test_no_pidfd_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_pidfd().status == "ok"

    def refuse(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    check = doctor.check_pidfd()
    assert check.status == "problem"
    assert "seccomp" in check.advice


def test_an_older_kernel_has_a_way_round_so_peerpidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SO_PEERPIDFD", 9999)  # unknown to any kernel, as 77 is to one before 6.5
    check = doctor.check_peer_pidfd()
    assert check.status == "warning"
    assert "the peer's pid is opened instead" in check.finding


def test_descriptors_that_do_not_arrive_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert doctor.check_descriptor_passing().status == "ok"

    def strip(sending: socket.socket, buffers: list[bytes], fds: list[int]) -> int:
        return sending.send(buffers[0])

    monkeypatch.setattr(socket, "send_fds", strip)
    assert doctor.check_descriptor_passing().status == "problem"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_of_ours_is_safe_and_one_that_others_can_write_to_is_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    finding = f"{tmp_path} (mode 0700, uid {os.getuid()})"
    assert doctor.check_socket_directory(tmp_path) == Check("socket directory", "ok", finding)
    tmp_path.chmod(0o755)
    assert doctor.check_socket_directory(tmp_path).status == "ok"
    tmp_path.chmod(0o777)
    check = doctor.check_socket_directory(tmp_path)
    assert check.status == "problem"
    assert check.advice.endswith(f"chmod 700 {tmp_path}")


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert doctor.check_socket_directory(tmp_path / "link").status == "problem"
    assert "is made by the first engine" in doctor.check_socket_directory(tmp_path / "a" / "b").finding
    write(tmp_path / "file", "")
    assert doctor.check_socket_directory(tmp_path / "file" / "a").status == "problem"


def test_a_directory_that_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    check = doctor.check_socket_directory(tmp_path / "a" / "b")
    assert (check.status, check.finding) == ("problem", f"{tmp_path}/a/b can't be made: {tmp_path} is not writable")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    check = doctor.check_socket_directory(tmp_path)
    assert check.status == "problem"
    assert f"must belong to uid {os.getuid()}" in check.advice
    os.chown(tmp_path, os.getuid(), -1)


def test_segments_of_dead_and_of_living_engines_are_distinguished(tmp_path: Path) -> None:
    assert doctor.check_leftovers(tmp_path) == Check("left segments", "ok", "none")
    left, living, fifo = (tmp_path / f"{NAME_PREFIX}-{os.getuid()}-{name}" for name in ("left", "living", "fifo"))
    left.write_bytes(b"x" * 8192)
    living.write_bytes(b"x")
    os.mkfifo(fifo)
    (tmp_path / f"{NAME_PREFIX}-{os.getuid() + 1}-other").write_bytes(b"x")
    with living.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        check = doctor.check_leftovers(tmp_path)
    assert (check.status, check.finding) == ("warning", f"8 KiB in {left.name}")
    assert left.exists()  # it only looks


def test_sockets_of_dead_engines_are_told_from_those_of_living_ones(tmp_path: Path) -> None:
    directory = tmp_path / "sockets"
    assert doctor.check_left_names(directory) == Check("left sockets", "ok", "none")
    directory.mkdir(mode=0o700)
    living = Listener.create(directory / "living.sock", others_may_connect=False)
    (directory / "dead.lock").write_text("4711\nshmring\n")
    check = doctor.check_left_names(directory)
    assert (check.status, check.finding) == ("warning", f"of dead in {directory}")
    assert (directory / "dead.lock").exists(), "it only looks"
    exit_code, checks, said = doctored("--sweep", "--slab-nbytes=8MiB", f"--socket-dir={directory}")
    assert (exit_code, checks["left sockets"].status) == (0, "ok"), checks
    assert "removed dead" in said
    assert sorted(os.listdir(directory)) == ["living.lock", "living.sock"]
    living.close()


# -- what is installed --------------------------------------------------------------------------------------------------


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_package("msgspec").finding == msgspec.__version__
    missing = doctor.check_package("a-package-that-is-not")
    assert (missing.status, missing.advice) == ("problem", "pip install a-package-that-is-not")

    def find_nothing(name: str) -> Any:
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", find_nothing)
    found = [doctor.check_package(name).status for name in ("av", "numpy", "shmring")]
    assert found == ["warning", "problem", "ok"], "a decoder can be done without, and shmring runs, so it is here"


def test_a_machine_on_which_nothing_works_is_a_row_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TEST_SLAB_NBYTES", 4000 * GIB)
    check = doctor.check_exchange()
    assert check.status == "problem"
    assert "a slab of 3.906 TiB can't be had" in check.finding
