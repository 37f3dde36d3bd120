from typing import Any

from shmring.core.compiled import ClientBook, EngineBook

class ObservedEngineBook(EngineBook):
    is_called: bool
    def follow(self, name: str, *arguments: Any, result: Any = None, error: BaseException | None = None) -> None: ...

class ObservedClientBook(ClientBook):
    is_called: bool
    def follow(
        self, name: str, *arguments: Any, result: Any = None, error: BaseException | None = None, **named: Any
    ) -> None: ...
