from collections.abc import Callable
from typing import Any

def watch(watcher: Callable[[str, Any, Any], object] | None) -> None: ...
