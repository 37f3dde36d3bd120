"""Objects of a subclass that is handed in, without its ``__init__`` and without looking ``__new__`` up by name."""

cdef extern from *:
    """
    static inline PyObject *new_instance(PyTypeObject *kind, PyObject *nothing) { return kind->tp_new(kind, nothing, NULL); }
    """
    object new_instance(type kind, tuple nothing)  # ``nothing``: its arguments, an empty tuple
