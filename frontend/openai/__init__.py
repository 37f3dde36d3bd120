"""OpenAI's JSON, as far as it is served: what requests and answers look like, and nothing that answers them.

The types are also what the OpenAPI document is made of (:mod:`frontend.documentation`), so their docstrings and descriptions
are for callers. Fields that are not named are ignored unless they would change the answer, and callers are told so
(:mod:`frontend.openai.parsing`).
"""
