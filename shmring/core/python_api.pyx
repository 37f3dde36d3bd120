"""Functions of Python's C interface that the core calls, and that Cython does not declare, or declares only for objects whose
references Cython counts."""

from cpython.object cimport PyObject, PyTypeObject, visitproc
from libc.stdint cimport int64_t

cdef extern from "Python.h":
    # References that are counted by hand: from :c:type:`PyObject*`, which Cython leaves alone.
    void drop_object "Py_DECREF"(PyObject*) noexcept
    void drop_object_unless_null "Py_XDECREF"(PyObject*) noexcept
    Py_ssize_t references_of "Py_REFCNT"(PyObject*) noexcept

    # Awaitables.
    ctypedef enum PySendResult:
        PYGEN_RETURN
        PYGEN_NEXT
    ctypedef PySendResult (*sendfunc)(PyObject*, PyObject*, PyObject**) noexcept
    ctypedef struct PyAsyncMethods:
        sendfunc am_send
    ctypedef PyObject* (*allocfunc)(PyTypeObject*, Py_ssize_t) noexcept
    ctypedef void (*freefunc)(void*) noexcept
    ctypedef struct AwaitedType "PyTypeObject":
        const char* tp_name
        Py_ssize_t tp_basicsize
        allocfunc tp_alloc
        freefunc tp_free
        PyAsyncMethods* tp_as_async
    int PyIter_Send(PyObject*, PyObject*, PyObject**) noexcept
    bint PyCoro_CheckExact(object) noexcept

    # Garbage collection.
    ctypedef int (*traverseproc)(PyObject*, visitproc, void*) noexcept
    ctypedef int (*inquiry)(PyObject*) noexcept
    ctypedef struct CollectedType "PyTypeObject":
        traverseproc tp_traverse
        inquiry tp_clear
    PyObject* PyType_GenericAlloc(PyTypeObject*, Py_ssize_t) noexcept
    PyObject* PyObject_Init(PyObject*, PyTypeObject*) noexcept
    void PyObject_GC_Track(PyObject*) noexcept
    void PyObject_GC_Del(PyObject*) noexcept
    int PyGC_Enable() noexcept
    int PyGC_Disable() noexcept

    # Errors.
    int PyErr_WarnFormat(object category, Py_ssize_t stack_level, const char* text, ...) noexcept
    void PyErr_Fetch(PyObject**, PyObject**, PyObject**) noexcept
    void PyErr_Restore(PyObject*, PyObject*, PyObject*) noexcept
    void PyErr_WriteUnraisable(PyObject*) noexcept
    void PyErr_SetNone(object) noexcept

    # Values.
    PyObject* new_bytes "PyBytes_FromStringAndSize"(const char*, Py_ssize_t) except NULL
    int resize_bytes "_PyBytes_Resize"(PyObject**, Py_ssize_t) except -1
    PyObject* PyList_GET_ITEM(list, Py_ssize_t) noexcept
    PyObject* PyTuple_GET_ITEM(tuple, Py_ssize_t) noexcept
    int64_t PyLong_AsLongLongAndOverflow(object, int*) except? -1
    Py_buffer* PyMemoryView_GET_BUFFER(object view)
    Py_ssize_t PyUnicode_GET_LENGTH(object) noexcept
    const void* PyUnicode_DATA(object) noexcept
    bint PyUnicode_IS_ASCII(object) noexcept

cdef extern from *:
    """
    static inline PyObject *new_instance(PyTypeObject *kind, PyObject *nothing) { return kind->tp_new(kind, nothing, NULL); }
    """
    # Makes an object of a given subclass, without calling its ``__init__`` and without looking ``__new__`` up by name.
    object new_instance(type kind, tuple nothing)  # ``nothing``: its arguments, an empty tuple
