"""Floor 0: errors carry what the server, the command line and the Python API say."""

from __future__ import annotations

import pytest

from pantheon import errors
from pantheon.errors import BadRequest, Busy, ModelFileError, NotFound, PantheonError, Unavailable


def test_body_has_the_four_openai_fields_and_the_numbers() -> None:
    fault = BadRequest("too long", param="messages", code="context_length_exceeded", n_prompt_tokens=9000, n_ctx=2048)
    assert fault.body() == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
            "n_prompt_tokens": 9000,
            "n_ctx": 2048,
        }
    }
    assert fault.status == 400 and str(fault) == "too long"


def test_retry_after_is_in_the_body_only_when_there_is_one() -> None:
    assert Busy("retry shortly", retry_after=3).body()["error"]["retry_after"] == 3
    assert "retry_after" not in PantheonError("no").body()["error"]
    assert Busy("retry shortly").body()["error"]["retry_after"] == 1, "a 429 or 503 always has it"


@pytest.mark.parametrize(
    ("kind", "status", "type_", "code"),
    [
        (PantheonError, 500, "server_error", None),
        (BadRequest, 400, "invalid_request_error", None),
        (NotFound, 404, "invalid_request_error", "not_found"),
        (Busy, 429, "server_busy", "server_busy"),
        (Unavailable, 503, "server_error", "unavailable"),
    ],
)
def test_each_kind_has_its_status_and_type(
    kind: type[PantheonError], status: int, type_: str, code: str | None
) -> None:
    fault = kind("x")
    assert (fault.status, fault.type, fault.code) == (status, type_, code)


def test_arguments_win_over_the_kind_and_do_not_change_it() -> None:
    fault = Busy("x", status=503, type="server_error", code="loading")
    assert (fault.status, fault.type, fault.code) == (503, "server_error", "loading")
    assert (Busy.status, Busy.type, Busy.code) == (429, "server_busy", "server_busy")


def test_a_file_error_names_file_fault_and_offset() -> None:
    fault = ModelFileError("/models/a.gguf", "tensor count 9 is more than the file can hold", offset=8)
    assert str(fault) == "/models/a.gguf: tensor count 9 is more than the file can hold (at byte 8)"
    assert (fault.path, fault.offset) == ("/models/a.gguf", 8)
    assert str(ModelFileError("a", "empty")) == "a: empty"
    assert ModelFileError("a", "first byte", offset=0).message.endswith("(at byte 0)")


def test_every_error_class_is_a_pantheon_error_with_a_docstring() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    assert len(classes) >= 7
    for one in classes:
        assert issubclass(one, PantheonError) and one.__doc__
