"""What the plug-in relies on in SGLang, and that it notices where that has changed; who writes to tensors that came."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.plug_ins import changed_servers

pytestmark = pytest.mark.timeout(600)

SGLANG = find_spec("sglang")
assert SGLANG is not None
assert SGLANG.submodule_search_locations is not None
SOURCES = Path(SGLANG.submodule_search_locations[0]) / "srt"


ON_A_CPU = {"SGLANG_USE_CPU_ENGINE": "1"}
run: Any = functools.partial(changed_servers.run, "SHMRING_SGLANG", **ON_A_CPU)

#: What is done to SGLang, and what is then said of it.
CHANGES = {
    "pass": "[]",
    "hooks.features.wrap_shm_features = lambda request: request": "<lambda> takes request, and not obj",
    "hooks.features._wrap_shm_or_inline = lambda tensor: tensor": "<lambda> does not use ShmPointerMMData, OSError",
    "del hooks.features.ShmPointerMMData.materialize": "AttributeError",
    "hooks.wire._is_shm_pointer_mm_data = lambda obj: False": "does not know the class that replaces ShmPointerMMData",
    "hooks.wire._from_msgpack_state = lambda obj: {}": "what a pointer says of itself comes as {}",
    "hooks.managers.TokenizerManager._send_one_request = lambda self, obj: None": "takes self, obj, and not self",
    "hooks.managers.TokenizerManager.__init__ = lambda self: None": "does not use init_ipc_channels",
    "del hooks.ports.PortArgs.__dataclass_fields__['instance_id']": "PortArgs has no instance_id",
    "hooks.receivers.SchedulerRequestReceiver._finalize_shm_features = lambda self, reqs: None": "does not use barrier",
}


def test_sglang_is_as_the_plug_in_needs_it_and_changes_are_noticed() -> None:
    for finding, line in zip(CHANGES.values(), changed_servers.said_of(CHANGES, "sglang.contract", **ON_A_CPU), strict=True):
        assert finding in line


def lines_of(*names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        paths = [SOURCES / name] if name.endswith(".py") else sorted((SOURCES / name).rglob("*.py"))
        for path in paths:
            yield from ((f"{path.relative_to(SOURCES)}: {line.strip()}", line) for line in path.read_text().splitlines())


def test_one_place_makes_pointers_and_one_receives_them() -> None:
    """Others would be places that the plug-in does not know."""
    wrapping = [place for place, line in lines_of("managers") if re.search(r"ShmPointerMMData\(", line)]
    assert wrapping == ["managers/mm_utils.py: return ShmPointerMMData(tensor, precomputed_hash=precomputed_hash)"]
    receiving = {place.split(":")[0] for place, line in lines_of("managers") if "unwrap_shm_features(" in line}
    assert receiving == {"managers/mm_utils.py", "managers/scheduler_components/request_receiver.py"}


def test_segments_have_the_name_that_tests_look_for() -> None:
    """See ``left_behind`` of :class:`tests.sglang.server.Server`."""
    done = run("import os; from sglang.srt.utils import stale_shm_cleanup as s; print(os.getpid(), s.make_shm_name('mm'))")
    pid, name = done.stdout.split()[-2:]
    assert name.startswith(f"sgl_shm_mm_{pid}_")
    assert any('make_shm_name("mm")' in line for _, line in lines_of("managers/mm_utils.py"))


FEATURES = r"(\.feature|precomputed_embeddings|pixel_values\w*|input_features|image_features|audio_features)(\[[^]]*\])*"
WRITING = re.compile(rf"{FEATURES}\s*(\+|-|\*|/|@)=|{FEATURES}\.[a-z]\w*_\(|{FEATURES.replace(')*', ')+')}\s*=[^=]")


def test_nobody_writes_to_a_tensor_that_has_come() -> None:
    """SGLang promises tensors that each rank may write to. In the slab, ranks can only read what they share."""
    assert WRITING.search("item.feature *= 2")
    assert WRITING.search("pixel_values[0] = 1")
    assert WRITING.search("item.feature.mul_(2)")
    assert not WRITING.search("item.feature = item.feature.to(device)")
    writing = [place for place, line in lines_of("models", "managers", "model_executor", "layers") if WRITING.search(line)]
    assert writing == []


STARTING = "from sglang.srt.plugins import load_plugins\nload_plugins()\nprint('started')"


def test_a_wrong_setting_stops_sglang_and_says_what_to_do() -> None:
    done = run(STARTING, SHMRING_SGLANG="1", SHMRING_SGLANG_SLAB="lots")
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert "SHMRING_SGLANG_SLAB='lots' can't be used: it has to be a size of 16MiB or more, such as 4GiB." in done.stderr


LOADED = STARTING + (
    "\nimport sys; print(sorted(name for name in sys.modules if name.split('.')[0] == 'shmring'))"
    "\nfrom sglang.srt.managers import mm_utils; print(hasattr(mm_utils.ShmPointerMMData, 'ends'))"
)


@pytest.mark.parametrize("value", ["0", "1"])
def test_it_is_loaded_and_does_nothing_unless_it_is_switched_on(value: str) -> None:
    done = run(LOADED, SHMRING_SGLANG=value)
    imported, is_replaced = done.stdout.splitlines()[-2:]
    assert ("shmring.integrations.sglang.hooking" in imported, is_replaced) == (value == "1", str(value == "1"))
    if value == "0":
        assert imported == "['shmring', 'shmring.integrations', 'shmring.integrations.sglang']"
