"""Keys: from where they come, who else may read them, and what is said when they can't be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmring.frontend.callers.keys import KeyOwner, read_keys
from tests.tables import for_each


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(0o600)
    return path


def test_each_key_counts_once(file: Path) -> None:
    file.write_text("b\nc\n")
    assert read_keys(["a", "b"], "a c d", file) == ("a", "b", "c", "d")
    assert read_keys([], None, None) == ()


@for_each("mode", [0o640, 0o604, 0o644, 0o444])
def test_a_file_that_others_can_read_is_refused_with_the_remedy(file: Path, mode: int) -> None:
    file.write_text("a-secret\n")
    file.chmod(mode)
    with pytest.raises(
        ValueError, match=rf"{file} can be read by others .*\(mode {mode:04o}\): chmod 600 {file}, or give"
    ) as raised:
        read_keys([], None, file)
    assert "a-secret" not in str(raised.value)


@for_each("mode", [0o600, 0o400])
def test_a_file_of_one_s_own_is_taken(file: Path, mode: int) -> None:
    file.write_text("a-secret\n")
    file.chmod(mode)
    assert read_keys([], None, file) == ("a-secret",)


@for_each("line", [b"two words", "schl\u00fcssel".encode(), b"\xff\xfe", b"a\x07bell"])
def test_an_error_about_a_key_names_file_and_line_and_not_the_key(file: Path, line: bytes) -> None:
    file.write_bytes(b"fine\n\n" + line + b"\n")
    with pytest.raises(ValueError) as raised:
        read_keys([], None, file)
    assert str(raised.value) == f"{file}, line 3: a key has visible ASCII characters only, and no spaces"


@for_each(
    ("options", "variable", "place"),
    [
        (["two words"], None, "--api-key"),
        (["fine", ""], None, "--api-key number 2"),
        ([], "schl\u00fcssel", "SHMRING_API_KEY"),
        ([], "fine schl\u00fcssel", "SHMRING_API_KEY, key 2"),
    ],
)
def test_an_error_about_a_key_names_its_place(options: list[str], variable: str | None, place: str) -> None:
    with pytest.raises(ValueError) as raised:
        read_keys(options, variable, None)
    assert str(raised.value) == f"{place}: a key has visible ASCII characters only, and no spaces"


@for_each("text", ["", "\n \n"])
def test_a_file_without_keys_is_an_error(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"{file} has no keys; write one in a line"):
        read_keys([], None, file)


def test_owners_stand_behind_their_keys(file: Path) -> None:
    file.write_text(
        "plain\nold name=alice max-concurrent-requests=8 max-slab-nbytes=1MiB\n"
        "new  max-slab-nbytes=1MiB\tname=alice max-concurrent-requests=8 \nb name=bob-2.x\n"
    )
    owners: dict[str, KeyOwner] = {}
    assert read_keys([], "env", file, owners=owners) == ("env", "plain", "old", "new", "b")
    assert list(owners.values()) == [
        KeyOwner(name="alice", keys=("old", "new"), max_concurrent_requests=8, max_slab_nbytes=1 << 20),
        KeyOwner(name="bob-2.x", keys=("b",)),
    ]
    assert "old" not in repr(owners)


@for_each(
    ("line", "message"),
    [
        (
            "a-secret max-concurrent-requests=8",
            "behind a key, name=NAME may stand, and then each of these once: max-concurrent",
        ),
        ("a-secret name=a nmae=b", "behind a key, name=NAME may stand"),
        ("a-secret name=a name=a", "behind a key, name=NAME may stand"),
        ("a-secret name=", "a name has up to 64 letters"),
        ("a-secret name=ä", "a name has up to 64 letters"),
        ("a-secret name=" + "a" * 65, "a name has up to 64 letters"),
        ('a-secret name=a"b', "a name has up to 64 letters"),
        *(
            (f"a-secret name=a max-concurrent-requests={text}", "write a number")
            for text in ("0", "-1", "1.5", "nan", "", "1e9")
        ),
        ("a-secret name=a max-requests-per-minute=" + "9" * 400, "write a number"),
        *(
            (f"a-secret name=a max-slab-nbytes={text}", "max-slab-nbytes: ")
            for text in ("0", "many", "-1", "nan", "1e999GiB", "")
        ),
        ("a-secret name=first", "this key stands in another line too"),
        ("another name=first max-concurrent-requests=2", "the name first stands in another line with other limits"),
        ("a-secret a-word", "a key has visible ASCII characters only, and no spaces"),
    ],
)
def test_an_error_about_an_owner_names_file_and_line_and_not_the_key(file: Path, line: str, message: str) -> None:
    file.write_text(f"a-secret name=first\n{line}\n" if "first" in line or "another" in message else f"\n{line}\n")
    with pytest.raises(ValueError) as raised:
        read_keys([], None, file, owners={})
    assert str(raised.value).startswith(f"{file}, line 2: ")
    assert message in str(raised.value)
    assert "a-secret" not in str(raised.value)
