from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

from shmring.core.compiled import RegionBytes

T = TypeVar("T")

IS_STEPPED: bool

class Intruder: ...

class LastView(Intruder):
    def __init__(self, memory: RegionBytes) -> None: ...

class OtherThread(Intruder):
    def __init__(self, asking: int, answered: int) -> None: ...

def at_each_step(module: ModuleType, begin: Callable[[], tuple[Callable[[], T], Intruder, Callable[[T], object]]]) -> int: ...
