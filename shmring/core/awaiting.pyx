"""The base of all objects that callers await: an operation that mostly need not wait.

Theory of operation. A coroutine costs an object, a frame and several calls of the interpreter, even if it need not wait. An
:class:`Awaited` does its work when it is awaited, as a coroutine does, and is mostly over at once. If it has to wait, it waits
*in* another object: a future, or a coroutine of the shell. It can be used like a coroutine: a task accepts it, ``throw``
cancels it, and Python warns if it is never awaited.

It does its work on the first ``send`` and never before: otherwise a cancellation before that would lose the result.

Each message takes three of them or four. So some are kept when they go, by their size, and used again.

Invariant: it does its work once at most.
"""

cimport cython
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.type cimport PyType_Modified
from libc.string cimport memset

from shmring import door
from shmring.uncopied import uncopied

cdef object _refuse = uncopied("it is awaited once; call again what returned it")
cdef char _nothing_more  # its address is what says so

cdef enum:
    _KEPT = 16           # objects of a size that are kept
    _MOST_WORDS = 32     # of an object that is kept

cdef PyObject* _kept[_MOST_WORDS]     # by their sizes in words; each holds the next one in place of its first member
cdef int _kept_counts[_MOST_WORDS]


cdef PyObject* nothing_more() noexcept:
    """For :meth:`Awaited.happen` to return: ``StopAsyncIteration``, without a traceback, which would cost as much as the rest."""
    return <PyObject*>&_nothing_more


cdef PyObject* owned(object result) noexcept:
    """A reference of its own, for :meth:`Awaited.happen` to return."""
    Py_INCREF(result)
    return <PyObject*>result


cdef class Awaited:  # type: Coroutine[Any, Any, _Result]
    """An object to await. Subclasses define its work."""

    cdef object _inner       # what it waits in; None: nothing
    cdef bint _begun

    cdef PyObject* happen(self) except NULL:
        """Does it; returns the result, or what :meth:`wait_in` returns."""
        raise NotImplementedError

    cdef PyObject* came(self, object result) except NULL:
        """The object that it waited in has this result. Returns its own result, or goes on waiting."""
        return owned(result)

    cdef int gave_up(self, type kind) except -1:
        """What it waited in has failed, or was cancelled.

        Args:
            kind: of the error.
        """
        return 0

    cdef int check_loop(self) except -1:
        """Raises our own error if it is awaited in the wrong event loop. asyncio has just raised an error that does not say
        what to do."""
        return 0

    cdef PyObject* wait_in(self, object awaitable) except NULL:
        """Waits in another object until the result is there."""
        self._inner = awaitable if PyCoro_CheckExact(awaitable) else awaitable.__await__()
        return owned(None)

    def __reduce_ex__(self, protocol: Any, /) -> Any:
        _refuse(self, protocol)

    def __await__(self) -> Generator[Any, Any, _Result]:
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value, /):
        """Goes on until it waits or has its result, as a coroutine does for its task."""
        cdef PyObject* result = NULL
        cdef int how = _send(<PyObject*>self, <PyObject*>value, &result)
        made = <object>result
        drop_object(result)
        if how == PYGEN_NEXT:
            return made
        raise StopIteration(made)

    def throw(self, kind: type[BaseException] | BaseException, value=None, traceback: TracebackType | None = None, /):
        """Raises an error where it waits."""
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
            self.gave_up(type(error))
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
        """Gives up what it waits for."""
        inner, self._inner, self._begun = self._inner, None, True
        if inner is not None:
            self.gave_up(GeneratorExit)
            close = getattr(inner, "close", None)
            if close is not None:
                close()


cdef class AlreadyDone:  # type: Awaitable[None]
    """The result of an operation that is over already, for callers that await it."""

    def __await__(self) -> Generator[Any]:
        return self

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


done: AlreadyDone = AlreadyDone()


@cython.final
cdef class NoDeadline:
    """In place of a deadline, for calls without a timeout."""

    @property
    def waits_for(self) -> Callable[[], str] | None:
        """What a deadline would say that it waits for; nobody asks for it here."""
        return None

    @waits_for.setter
    def waits_for(self, asked: Callable[[], str] | None) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        pass


no_deadline: NoDeadline = NoDeadline()


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
    """The object that it waited in has failed. The exception is set, and stays set."""
    cdef PyObject* kind
    cdef PyObject* value
    cdef PyObject* traceback
    PyErr_Fetch(&kind, &value, &traceback)
    awaited._inner = None
    awaited.gave_up(<type>kind)
    PyErr_Restore(kind, value, traceback)
    return 0


cdef PyObject* _allocate(PyTypeObject* kind, Py_ssize_t items) noexcept:
    """The type's ``tp_alloc``."""
    cdef Py_ssize_t nbytes = (<AwaitedType*>kind).tp_basicsize, words = nbytes // sizeof(void*)
    cdef PyObject* made = _kept[words]
    if made == NULL:
        return PyType_GenericAlloc(kind, items)
    _kept[words] = (<PyObject**>(made + 1))[0]
    _kept_counts[words] -= 1
    memset(made + 1, 0, nbytes - sizeof(PyObject))
    PyObject_Init(made, kind)
    PyObject_GC_Track(made)
    return made


cdef void _free_awaited(PyObject* self) noexcept:
    """The type's ``tp_free``: its members have gone."""
    cdef AwaitedType* kind = <AwaitedType*>self.ob_type
    cdef Py_ssize_t words = kind.tp_basicsize // sizeof(void*)
    if not (<Awaited>self)._begun:
        _warn(kind.tp_name)
    if _kept_counts[words] == _KEPT:
        PyObject_GC_Del(self)
        return
    (<PyObject**>(self + 1))[0], _kept[words] = _kept[words], self
    _kept_counts[words] += 1


cdef void _warn(const char* name) noexcept:
    """An object was never awaited. An exception may be set, and stays set."""
    cdef PyObject* kind
    cdef PyObject* value
    cdef PyObject* traceback
    PyErr_Fetch(&kind, &value, &traceback)
    if PyErr_WarnFormat(RuntimeWarning, 1, "%s was never awaited", name) < 0:
        PyErr_WriteUnraisable(NULL)
    PyErr_Restore(kind, value, traceback)


cdef int may_be_awaited(type kind) except -1:
    """Gives a final subclass its ``am_send``, and objects that are used again; once, when its module is loaded."""
    cdef AwaitedType* slots = <AwaitedType*><PyObject*>kind
    assert slots.tp_basicsize < _MOST_WORDS * sizeof(void*), "its objects are too large to be kept"
    slots.tp_as_async.am_send = <sendfunc><void*>_send
    slots.tp_alloc, slots.tp_free = _allocate, <freefunc>_free_awaited
    PyType_Modified(kind)
    return 0


cdef object right_timeout(object timeout):
    """Returns a timeout of a caller, checked by :func:`~shmring.door.timeout_of` if it is not a usual one."""
    if timeout is None or (type(timeout) is float and 0 <= <double>timeout < door.LONGEST_S):
        return timeout
    return door.timeout_of(timeout)
