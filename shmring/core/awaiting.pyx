"""What callers await: an operation that mostly need not wait.

Theory of operation. A coroutine costs an object, a frame and several calls of the interpreter, also where nothing has to be waited
for. An :class:`Awaited` happens when it is awaited, as a coroutine does, and is then over at once; if something has to be waited for,
it waits *in* something else: a future, or a coroutine of the shell. It passes for a coroutine: tasks take it, it is cancelled
by ``throw``, and who forgets to await it is warned.

It happens on the first ``send`` and never before: otherwise what it has taken would be lost with a cancellation.

Invariant: it happens once at most.
"""

from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.type cimport PyType_Modified

from shmring import config

cdef char _nothing_more  # its address is what says so


cdef PyObject* nothing_more() noexcept:
    """For :meth:`Awaited.happen` to return: ``StopAsyncIteration``, without a traceback, which would cost as much as the rest."""
    return <PyObject*>&_nothing_more


cdef PyObject* owned(object result) noexcept:
    """A reference of its own, for :meth:`Awaited.happen` to return."""
    Py_INCREF(result)
    return <PyObject*>result


cdef class Awaited:  # type: Coroutine[Any, Any, _Result]
    """Something to be awaited; subclasses say what happens then."""

    cdef object _inner       # what it waits in; None: nothing
    cdef bint _begun

    cdef PyObject* happen(self) except NULL:
        """Does it; returns the result, or what :meth:`wait_in` returns."""
        raise NotImplementedError

    cdef PyObject* came(self, object result) except NULL:
        """What it waited in has this result; returns its own, or waits on."""
        return owned(result)

    cdef int gave_up(self) except -1:
        """What it waited in has failed, or was cancelled."""
        return 0

    cdef int check_loop(self) except -1:
        """Raises if it is awaited in another loop than that of its end, which asyncio has just refused in its own words."""
        return 0

    cdef PyObject* wait_in(self, object awaitable) except NULL:
        """Waits in something else, before the result is there."""
        self._inner = awaitable.__await__()
        return owned(None)

    def __await__(self) -> Generator[Any, Any, _Result]:
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value, /):
        """As of a coroutine."""
        cdef PyObject* result = NULL
        cdef int how = _send(<PyObject*>self, <PyObject*>value, &result)
        made = <object>result
        drop_object(result)
        if how == PYGEN_NEXT:
            return made
        raise StopIteration(made)

    def throw(self, kind: type[BaseException] | BaseException, value=None, traceback: TracebackType | None = None, /):
        """As of a coroutine."""
        cdef PyObject* result
        if self._inner is None:
            self._begun = True
            raise kind if value is None else value
        try:
            return self._inner.throw(kind) if value is None else self._inner.throw(kind, value, traceback)
        except StopIteration as stopped:
            self._inner = None
            result = self.came(stopped.value)
        except BaseException as error:
            self._inner = None
            self.gave_up()
            if type(error) is RuntimeError:
                self.check_loop()
            raise
        if result == <PyObject*>&_nothing_more:
            raise StopAsyncIteration
        made = <object>result
        drop_object(result)
        if self._inner is not None:
            return self.send(None)
        raise StopIteration(made)

    def close(self) -> None:
        """As of a coroutine."""
        inner, self._inner, self._begun = self._inner, None, True
        if inner is not None:
            self.gave_up()
            close = getattr(inner, "close", None)
            if close is not None:
                close()

    def __dealloc__(self) -> None:
        cdef PyObject* kind
        cdef PyObject* value
        cdef PyObject* traceback
        if not self._begun:
            PyErr_Fetch(&kind, &value, &traceback)
            if PyErr_WarnFormat(RuntimeWarning, 1, "%s was never awaited", type_of(self).tp_name) < 0:
                PyErr_WriteUnraisable(NULL)
            PyErr_Restore(kind, value, traceback)


cdef class AlreadyDone:  # type: Awaitable[None]
    """What has happened already, for who awaits it."""

    def __await__(self) -> Generator[Any]:
        return self

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


done: AlreadyDone = AlreadyDone()


cdef int _send(PyObject* self, PyObject* value, PyObject** result) except -1:
    """The type's ``am_send``, which ``await`` calls: it needs no exception to return a result."""
    cdef Awaited awaited = <Awaited>self
    cdef PyObject* made
    cdef int how
    result[0] = NULL
    if awaited._inner is None:
        if awaited._begun:
            raise RuntimeError(f"{type(awaited).__name__} was awaited already; call again what returned it")
        awaited._begun = True
        made = awaited.happen()
        if awaited._inner is None:
            return _returned(made, result)
        drop_object(made)
    while True:
        how = PyIter_Send(<PyObject*>awaited._inner, value, &made)
        if how == PYGEN_NEXT:
            result[0] = made
            return how
        if how != PYGEN_RETURN:
            _fail(awaited)
            return -1
        awaited._inner = None
        waited = <object>made
        drop_object(made)
        made = awaited.came(waited)
        if awaited._inner is None:
            return _returned(made, result)
        drop_object(made)
        value = <PyObject*>None


cdef int _returned(PyObject* made, PyObject** result) noexcept:
    if made == <PyObject*>&_nothing_more:
        PyErr_SetNone(StopAsyncIteration)
        return -1
    result[0] = made
    return PYGEN_RETURN


cdef int _fail(Awaited awaited) noexcept:
    """What it waited in has failed, with the exception that is set, and stays set."""
    cdef PyObject* kind
    cdef PyObject* value
    cdef PyObject* traceback
    PyErr_Fetch(&kind, &value, &traceback)
    awaited._inner = None
    awaited.gave_up()
    PyErr_Restore(kind, value, traceback)
    return 0


cdef int may_be_awaited(type kind) except -1:
    """Gives a subclass its ``am_send``; once, when its module is loaded."""
    (<AsyncType*><PyObject*>kind).tp_as_async.am_send = <sendfunc><void*>_send
    PyType_Modified(kind)
    return 0


cdef int check_timeout(object timeout) except -1:
    """Raises unless this is a number of seconds, or None. What it mostly is costs nothing."""
    if timeout is not None and type(timeout) is not float and type(timeout) is not int:
        config.check_timeout(timeout)
    return 0
