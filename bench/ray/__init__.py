"""``python -m bench ray``: requests in a Ray cluster of two nodes, beside calls of an actor with a tensor; and Ray Serve.

It needs the environment that ``make test-ray`` makes.
"""
