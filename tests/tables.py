"""A table of cases in one test: types, files, sizes, and whatever else is many times the same question.

``for_each`` has the arguments of ``pytest.mark.parametrize``, but makes one test of all rows. All rows are tried, also behind
one that fails, and each that fails is reported by its name. The rows share the fixtures of the test, but for ``monkeypatch``:
what one row has patched is as before when the next one comes.

A table of attacks stays with ``pytest.mark.parametrize``, so that each attack has a test of its own. So does a test that
needs a new ring or process for each row.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

_MAX_NAME_LENGTH = 120  # of a row, in a report
_FAILURES = (Exception, pytest.fail.Exception, pytest.skip.Exception)  # the latter two are no Exceptions


def slow(*values: Any) -> Any:
    """A row of ``pytest.mark.parametrize`` that ``make test-all`` tries, and ``make test`` does not."""
    return pytest.param(*values, marks=pytest.mark.slow)


Row = tuple[Callable[[], str], dict[str, Any]]  # its name is made when it fails: values may be large


def for_each(
    names: str | Sequence[str], values: Iterable[Any], *, ids: Iterable[Any] | Callable[[Any], Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Calls a test once for each row of a table; two of these make a table of all pairs of their rows.

    Args:
        names: the arguments of the test that a row has values for.
        values: the rows; of one argument, its values.
        ids: what a row is called if it fails: all names, or what makes one of a value. Otherwise its values are shown.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = list(_rows(arguments, list(values), ids))
    assert table, f"there is nothing to try for {', '.join(arguments)}"

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        tables = [table, *getattr(function, "tables", ())]
        test = getattr(function, "of_one_row", function)
        parameters = [parameter for name, parameter in inspect.signature(function).parameters.items() if name not in arguments]

        def rows() -> Iterator[Row]:
            for parts in itertools.product(*tables):
                yield functools.partial(_joined, parts), {name: value for _, row in parts for name, value in row.items()}

        @functools.wraps(function)
        def try_all(*, subtests: pytest.Subtests, **fixtures: Any) -> None:
            for name, row in rows():
                try:
                    with _of_a_row(fixtures) as own:
                        test(**row, **own)
                except _FAILURES:
                    with subtests.test(name()):
                        raise

        @functools.wraps(function)
        async def await_all(*, subtests: pytest.Subtests, **fixtures: Any) -> None:
            for name, row in rows():
                try:
                    with _of_a_row(fixtures) as own:
                        await test(**row, **own)
                except _FAILURES:
                    with subtests.test(name()):
                        raise

        whole: Any = await_all if inspect.iscoroutinefunction(test) else try_all
        whole.tables, whole.of_one_row = tables, test
        if not hasattr(function, "tables"):
            parameters.append(inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY))
        whole.__signature__ = inspect.Signature(parameters)
        return whole  # type: ignore[no-any-return]

    return decorate


@contextlib.contextmanager
def _of_a_row(fixtures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        yield fixtures | ({"monkeypatch": patched} if "monkeypatch" in fixtures else {})


def _rows(arguments: list[str], values: list[Any], ids: Iterable[Any] | Callable[[Any], Any] | None) -> Iterator[Row]:
    call, names = (ids, [None] * len(values)) if ids is None or callable(ids) else (None, list(ids))
    for value, name in zip(values, names, strict=True):
        row = (value,) if len(arguments) == 1 else tuple(value)
        yield functools.partial(_name_of, name, row, call), dict(zip(arguments, row, strict=True))


def _joined(parts: Iterable[Row]) -> str:
    return " - ".join(name() for name, _ in parts)


def _name_of(name: Any, row: Iterable[Any], call: Callable[[Any], Any] | None) -> str:
    if name is None:
        name = ", ".join(_name_of_value(value, call) for value in row)
    return str(name)[:_MAX_NAME_LENGTH]


def _name_of_value(value: Any, call: Callable[[Any], Any] | None) -> str:
    name = None if call is None else call(value)
    return str(name if name is not None else getattr(value, "__name__", None) or ascii(value))
