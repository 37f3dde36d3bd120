"""The part of OpenAI's JSON that is served: the types of requests and answers. No code here answers a request.

The OpenAPI document is generated from these types (:mod:`shmring.frontend.documentation`), so their docstrings and descriptions
are for callers. Fields that are not named here are ignored unless they would change the answer, and the answer names the
ignored fields (:mod:`shmring.frontend.http.parsing`).
"""
