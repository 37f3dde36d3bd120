"""What the environment says: vLLM is configured so, and its processes inherit it.

Each variable is a field of :class:`Settings`, checked when vLLM starts. ``docs/vllm.md`` has a table of them, which a
test compares with this file.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping
from typing import Literal

from shmring.door import parse_nbytes
from shmring.integrations.environment import Reader, choice, ring_name, run_variable, seconds

__all__ = ["NAMES", "PREFIX", "Settings"]

PREFIX = "SHMRING_VLLM"
NAMES = (  # each behind the prefix and "_"
    "SLAB", "MIN_NBYTES", "WAIT_S", "KEEP", "TAKE_TIMEOUT_S", "PIN", "CHECK", "NAME", "WORKERS", "BROADCAST",
    "DEVICE_SLAB",
)  # fmt: skip

_MIN_SLAB_NBYTES = 16 << 20  # a slab of a few pictures; less is a typing error
_LEAST_MIN_NBYTES = 16 << 10  # below that a tensor travels in shmring's message anyway, and vLLM's carries it as well
_LONGEST_WAIT_S = 10.0  # a request that waits longer for space had better gone inline
_LONGEST_TAKE_S = 60.0  # no other request is decoded meanwhile


def _device_slab(text: str) -> int:
    nbytes = parse_nbytes(text)
    if 0 < nbytes < _MIN_SLAB_NBYTES:
        raise ValueError
    return nbytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The plug-in's settings. Sizes in bytes.

    Attributes:
        slab_nbytes: ``SHMRING_VLLM_SLAB``, the slab of each engine core.
        min_nbytes: ``SHMRING_VLLM_MIN_NBYTES``, smaller tensors stay in vLLM's message.
        wait_s: ``SHMRING_VLLM_WAIT_S``, how long a request may wait for space before its tensor goes inline.
        keep_nbytes: ``SHMRING_VLLM_KEEP``, what each slab may hold of tensors that vLLM's processor cache would send again.
        take_timeout_s: ``SHMRING_VLLM_TAKE_TIMEOUT_S``, how long an engine core waits for a tensor that a request names.
        pin: ``SHMRING_VLLM_PIN``, whether the slab is registered with CUDA; as ``RingConfig.pin``.
        check: ``SHMRING_VLLM_CHECK``, whether each tensor's checksum is compared at the other end, for finding errors.
        name: ``SHMRING_VLLM_NAME``, what rings are called, followed by the engine core's number; empty: each engine core makes
            a name up.
        run: what made-up names begin with: the first process of a server says it to the others.
        workers: ``SHMRING_VLLM_WORKERS``, whether an engine core and its workers talk through shmring.
        broadcast_nbytes: ``SHMRING_VLLM_BROADCAST``, memory of each engine core for what it sends its workers and no API
            server has put into the slab.
        device_slab_nbytes: ``SHMRING_VLLM_DEVICE_SLAB``, memory of each engine core on its GPU for tensors that API servers
            have on that GPU; 0: these go vLLM's own way.
    """

    slab_nbytes: int = 1 << 30
    min_nbytes: int = 2 << 20  # about a megabyte costs as much in waking both ends as it saves
    wait_s: float = 0.05
    keep_nbytes: int = 1 << 29
    take_timeout_s: float = 5.0
    pin: Literal["auto", "on", "off"] = "auto"
    check: bool = False
    name: str = ""
    run: str = "vllm"
    workers: bool = True
    broadcast_nbytes: int = 256 << 20
    device_slab_nbytes: int = 0  # until it has run on a GPU

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Reads and checks all of them.

        Raises:
            SettingError: one can't be used.
        """
        environment = os.environ if environment is None else environment
        read = Reader(environment, PREFIX, NAMES)
        slab_nbytes = read.nbytes("SLAB", cls.slab_nbytes, _MIN_SLAB_NBYTES, "a size of 16MiB or more, such as 4GiB")
        return cls(
            slab_nbytes=slab_nbytes,
            min_nbytes=read.nbytes("MIN_NBYTES", cls.min_nbytes, _LEAST_MIN_NBYTES, "a size of 16KiB or more, such as 64KiB"),
            wait_s=read.value("WAIT_S", cls.wait_s, seconds(0, _LONGEST_WAIT_S), "seconds from 0 to 10"),
            keep_nbytes=read.nbytes("KEEP", slab_nbytes // 2, 0, "a size, such as 512MiB, or 0 to keep nothing"),
            take_timeout_s=read.value(
                "TAKE_TIMEOUT_S", cls.take_timeout_s, seconds(0.01, _LONGEST_TAKE_S), "seconds from 0.01 to 60"
            ),
            pin=read.value("PIN", cls.pin, choice("auto", "on", "off"), "auto, on or off"),
            check=read.value("CHECK", "0", choice("0", "1"), "0 or 1") == "1",
            name=read.value("NAME", cls.name, ring_name, "letters, digits, '.', '_' and '-', at most 56"),
            run=environment.get(run_variable(PREFIX), cls.run),
            workers=read.value("WORKERS", "1", choice("0", "1"), "0 or 1") == "1",
            broadcast_nbytes=read.nbytes("BROADCAST", cls.broadcast_nbytes, _MIN_SLAB_NBYTES, "a size of 16MiB or more"),
            device_slab_nbytes=read.value("DEVICE_SLAB", cls.device_slab_nbytes, _device_slab, "a size of 16MiB or more, or 0"),
        )

    def ring_name(self, engine_index: int) -> str:
        """Returns what an engine core's ring is called; a made-up name is another one each time."""
        return f"{self.name}-{engine_index}" if self.name else f"{self.run}-{engine_index}-{secrets.token_hex(3)}"
