"""Building from source: what a wheel has in it, where it runs, which compilers do, and what is said where there is none."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/programs/exchange_a_tensor.py"
COMPILED = {path.stem for pattern in ("core/compiled.pyx", "memory/_*.c") for path in ROOT.glob(f"shmring/{pattern}")}
LINKED = ("engine", "frontend")  # which are packages of shmring
COMPILERS = ("*gcc*", "*g++*", "*clang*", "cc", "c++", "c[89]9*", "cpp*", "*-cpp*", "tcc")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
CROSS_COMPILER = "aarch64-linux-gnu-gcc"

# Of AVX, which all begin with v (but for verr and verw, which no compiler writes), and of BMI: what -march would bring. Not
# tzcnt, which gcc writes for any processor where the number is not 0: older ones execute it as bsf, which gives the same.
NEWER_INSTRUCTIONS = re.compile(r"\t(v|andn|bzhi|mulx|rorx|sarx|shlx|shrx|lzcnt|popcnt)")

NO_HEADERS = "import sysconfig; sysconfig.get_path = lambda name: '/nonexistent'; exec(open('setup.py').read())"


@pytest.mark.parametrize(
    ("program", "missing"),
    [
        (["setup.py"], "no C compiler (gcc, clang, cc) is on the PATH"),
        (["-c", NO_HEADERS], "Python's headers are not installed"),
    ],
)
def test_what_is_missing_is_said_with_what_to_install(program: list[str], missing: str, tmp_path: Path) -> None:
    if "ziglang" in sys.modules or (Path(sysconfig.get_path("purelib")) / "ziglang").exists():
        pytest.skip("the package ziglang is installed, and has a compiler")
    environment = {name: value for name, value in os.environ.items() if name != "CC"} | {"PATH": str(tmp_path)}
    command = [*program, "--quiet", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    build = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert build.returncode == 1
    assert build.stderr.splitlines()[-1] == (
        f"shmring builds its core from C, and {missing}: install gcc or clang and Python's headers "
        "(Debian: apt install gcc python3-dev), or install a wheel, which needs neither"
    )


QUICK = "-O1 -fwrapv"  # for builds that are looked at, and whose speed nobody measures: they take half the time


def copy_sources(directory: Path) -> Path:
    """Copies the checkout, but for what was made in it."""
    made = shutil.ignore_patterns(
        ".git", ".*_cache", ".hypothesis", ".venv*", "build", "dist", "site", "*.egg-info", "*.so", "__pycache__", "shared"
    )
    return Path(shutil.copytree(ROOT, directory / "sources", symlinks=True, ignore=made))


def make(sources: Path, *arguments: str, path: str | None = None, cflags: str | None = None) -> str:
    """Runs make with this installation, unless VENV says another one; returns what it wrote."""
    ours = [f"VENV={sys.prefix}", "--old-file", f"{sys.prefix}/.installed"]
    command = ["make", "--no-print-directory", *ours, *arguments]
    others = ("CC", "CFLAGS", "LDFLAGS", "MAKEFLAGS", "MAKELEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in others}
    environment |= {"PATH": path or environment["PATH"]} | ({} if cflags is None else {"CFLAGS": cflags})
    finished = subprocess.run(
        command, cwd=sources, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def fresh_environment(directory: Path) -> Path:
    """Makes a virtual environment that sees the packages installed here, but not this checkout, and returns its directory."""
    environment = directory / "environment"
    venv.create(environment, with_pip=False)  # pip is one of those packages
    [packages] = environment.glob("lib/python*/site-packages")
    # A directory that a .pth file names has no say by .pth files of its own, such as that of an editable installation.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


def exchange(environment: Path, directory: Path, socket_dir: Path) -> dict[str, Any]:
    """Runs the program with a PATH that has nothing, in a directory that has nothing."""
    (empty := directory / "empty").mkdir()
    command = [environment / "bin/python", "-I", PROGRAM, socket_dir]
    finished = subprocess.run(
        command, cwd=empty, env={"PATH": str(empty)}, capture_output=True, text=True, check=False, timeout=60
    )
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout)
    assert answer["sum"] == 2 << 20
    assert {name.rpartition(".")[2] for name in answer["compiled"]} == COMPILED
    return answer


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a wheel and the sdist from which it was built."""
    sources = copy_sources(tmp_path_factory.mktemp("build"))
    make(sources, "wheel")
    return sources / "dist"


def installed(file: Path) -> str:
    """Returns where a file of the checkout lies in a wheel, and in an sdist."""
    path = file.relative_to(ROOT)
    return str(Path("shmring", path) if path.parts[0] in LINKED else path)


def compiled_in(wheel: zipfile.ZipFile) -> dict[str, ELFFile]:
    """Returns the shared objects of a wheel, by name."""
    return {name: ELFFile(wheel.open(name)) for name in wheel.namelist() if name.endswith(".so")}


def check_shared_object(file_name: str, elf: ELFFile) -> None:
    """It exports what the interpreter calls, needs libc alone, and no debug information and no directory of this machine."""
    assert not [section.name for section in elf.iter_sections() if section.name.startswith(".debug")]
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    exported = {
        symbol.name for symbol in symbols if symbol["st_info"]["bind"] != "STB_LOCAL" and symbol["st_shndx"] != "SHN_UNDEF"
    }
    assert exported == {f"PyInit_{file_name.partition('.')[0]}"}
    tags = [*elf.get_section_by_name(".dynamic").iter_tags()]
    assert {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"} <= {"libc.so.6"}
    assert not [tag for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]


def check_runs_on_older_systems(wheel: Path) -> None:
    """It is for every Linux with glibc 2.17 or later, as the README says: whatever newer one it was built on."""
    versions = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", wheel.name)]
    assert versions
    assert min(versions) <= 17, wheel.name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_has_what_runs_and_what_describes_it(distributions: Path) -> None:
    [path] = distributions.glob("*.whl")
    check_runs_on_older_systems(path)
    wheel = zipfile.ZipFile(path)
    names = set(wheel.namelist())
    described = ("shmring/**/*.pyi", "shmring/py.typed")
    for pattern in (*described, "engine/**/*.py", "frontend/**/*.py", "frontend/samples/*"):
        files = {installed(file) for file in ROOT.glob(pattern)}
        assert files
        assert files <= names
    assert not [name for name in names if name.endswith((".pyx", ".c", ".h"))]
    objects = compiled_in(wheel)
    assert {Path(name).name for name in objects} == {f"{name}{SUFFIX}" for name in COMPILED}
    for name, elf in objects.items():
        check_shared_object(Path(name).name, elf)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64's instructions")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump (Debian: apt install binutils)")
def test_a_wheel_needs_no_newer_processor(distributions: Path, tmp_path: Path) -> None:
    [path] = distributions.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        objects = [wheel.extract(name, tmp_path) for name in wheel.namelist() if name.endswith(".so")]
    functions = set()
    for listing in [subprocess.check_output(["objdump", "-d", "--no-show-raw-insn", name], text=True) for name in objects]:
        function = ""
        for line in listing.splitlines():
            function = line.partition("<")[2].rstrip(">:") if line.endswith(">:") else function
            if NEWER_INSTRUCTIONS.search(line):
                functions.add(function)
    assert functions == {"lines_avx2", "lines_avx512"}, "which run only where the processor says that it has them"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_sdist_has_what_is_written_and_nothing_generated(distributions: Path) -> None:
    [path] = distributions.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    written = {
        installed(file)
        for package in ("shmring", *LINKED)
        for ending in ("pyx", "h", "c", "pyi", "py", "typed", "jpg", "wav", "md", "html", "css", "js")
        for file in ROOT.glob(f"{package}/**/*.{ending}")
    } - {"shmring/core/compiled.pyi"}
    assert written == {name for name in names if name.startswith("shmring/") and Path(name).suffix}
    assert {"setup.py", "core_interface.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"} <= names


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_carries_a_tensor_where_there_is_no_compiler(distributions: Path, tmp_path: Path, socket_dir: Path) -> None:
    environment = fresh_environment(tmp_path)
    [packages] = environment.glob("lib/python*/site-packages")
    before = {path.name.partition("-")[0] for path in packages.iterdir()}
    [wheel] = distributions.glob("*.whl")
    subprocess.run(
        [environment / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", "--no-index", wheel],
        cwd=tmp_path,
        check=True,
    )
    added = {path.name.partition("-")[0] for path in packages.iterdir()} - before
    assert added == {"shmring"}  # nothing that stands beside somebody's own engine.py
    answer = exchange(environment, tmp_path, socket_dir)
    for file in (answer["shmring"], *answer["compiled"].values()):
        assert Path(file).is_relative_to(environment)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_make_takes_a_compiler_from_the_package_index(tmp_path: Path, socket_dir: Path) -> None:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-c", "constraints.txt", "--dest", tmp_path]
    if subprocess.run([*download, "ziglang"], cwd=ROOT, capture_output=True, check=False).returncode != 0:
        pytest.skip("the package index can't be reached, or has no ziglang")
    (tools := tmp_path / "tools").mkdir()
    for directory in reversed(os.environ["PATH"].split(os.pathsep)):
        for tool in Path(directory).glob("*"):
            if not any(fnmatch(tool.name, compiler) for compiler in COMPILERS):
                (tools / tool.name).unlink(missing_ok=True)
                (tools / tool.name).symlink_to(tool)
    sources = copy_sources(tmp_path)
    environment = fresh_environment(tmp_path)
    output = make(sources, "install", f"VENV={environment}", f"PYTHON={sys.executable}", path=str(tools), cflags=QUICK)
    assert "No C compiler is on the PATH (gcc, clang, cc): taking one from the package index" in output
    answer = exchange(environment, tmp_path, socket_dir)
    for file in (answer["shmring"], *answer["compiled"].values()):
        assert Path(file).is_relative_to(sources)
        if file.endswith(".so"):
            with open(file, "rb") as opened:
                elf = ELFFile(opened)
                check_shared_object(Path(file).name, elf)
                assert b"LLD" in elf.get_section_by_name(".comment").data()  # its linker, which gcc does not take


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    shutil.which(CROSS_COMPILER) is None, reason=f"no {CROSS_COMPILER} (Debian: apt install gcc-aarch64-linux-gnu)"
)
def test_the_core_compiles_for_another_processor(tmp_path: Path) -> None:
    preprocess = [CROSS_COMPILER, "-E", "-I", sysconfig.get_path("include"), "-include", "Python.h", "-x", "c", os.devnull]
    if (headers := subprocess.run(preprocess, capture_output=True, text=True, check=False)).returncode != 0:
        pytest.skip(f"Python's headers are not for other processors: {headers.stderr.splitlines()[-1]}")
    sources = copy_sources(tmp_path)
    make(sources, "wheel", "ARCH=aarch64")
    [path] = (sources / "dist").glob("*.whl")
    assert path.name.endswith("_aarch64.whl")
    check_runs_on_older_systems(path)
    objects = compiled_in(zipfile.ZipFile(path))
    assert {Path(name).name.partition(".")[0] for name in objects} == COMPILED
    for name, elf in objects.items():
        check_shared_object(Path(name).name, elf)
        assert elf["e_machine"] == "EM_AARCH64"
        assert name.endswith("-aarch64-linux-gnu.so")
