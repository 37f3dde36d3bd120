"""The part of Anthropic's JSON that is served: requests, answers and errors of ``/v1/messages``. No code here answers a
request.

Each request becomes the request of a chat (:mod:`shmring.frontend.openai.chat`). The OpenAPI document is generated from these
types, too.
"""
