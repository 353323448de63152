"""Floor 6: HTTP in, SSE out; the registry, the chat API and the admin API.

`http_*.py`, `sse.py` and `routes.py` are the HTTP floor: they know bytes, sockets and error shapes, and must not know
models, tokens or chat requests.  Everything else in this package codes against `routes.py`.
"""
