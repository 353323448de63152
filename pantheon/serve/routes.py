"""Routes: which handler answers a request, and what becomes of its errors.

What the rest of `serve/` codes against:

    router = Router()                                    # already answers GET / (M026)
    router.add("GET", "/v1/models", handler)             # exact path
    router.add("GET", "/v1/models/", handler)            # a path that ends in "/" is a prefix; request.tail is the rest

    def handler(request: Request, responder: Responder) -> None: ...

    request.method .path .query (dict) .headers (case-insensitive .get(name)) .body (bytes) .json() -> dict (raises 400s)
           .http_version .client .id .tail
    responder.send_json(status, obj, headers={})         # one answer; silent when the client is gone
    responder.send_bytes(status, content_type, data, headers={})
    responder.begin_sse(headers={}) -> SseStream         # 200 text/event-stream, head goes out at once
    responder.client_gone() -> bool                      # cheap; call once per decode step and prefill chunk
    responder.stopping() -> bool                         # the server is shutting down
    responder.should_stop() -> bool                      # either of the two: the `cancelled` callback of generate()
    stream.send(obj) .comment(text) .error(exc) .done()  # send raises Cancelled when the client is gone

Rules for handlers
- Raise a PantheonError for every refusal.  Before the first byte it becomes its status with the OpenAI error body (429 and
  503 with Retry-After); after begin_sse() it becomes `data: {"error": …}`, `data: [DONE]` and a clean end.  Any
  other exception is a 500 without a trace of the traceback, which goes to the log.
- Let `Cancelled` pass: it is logged as cancelled when the client is gone, and answered 503 `shutting_down` (or an error
  event with that code) when it was the server that stopped.
- A handler that will stream calls begin_sse() before the first client_gone() / should_stop().  For an answer that has not
  begun, client_gone() takes it to be JSON: once the client has closed its sending side, the only way to tell a
  half-closed client (which must be answered) from one that is gone is to send it something.  So the head of a 200
  JSON answer goes out early, followed by blanks, which JSON allows in front of a value; a client that is gone resets the
  connection.  An error found after that still comes as the JSON error object, but under status 200, and headers given
  to send_json() are lost.  Clients that keep their sending side open, which is nearly all, never see this.
- HEAD is served by the GET handler; the body is dropped here.  Every answer closes its connection (M031).

Must not know models or chat requests.
"""
