"""Who is let in: keys, where they come from, and what strangers and their web pages may not do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from giveway.build_server import ServerOptions, make_keyring
from giveway.core.errors import ConfigError
from giveway.server.access import Caller, Keyring, read_key_file
from giveway.server.http_errors import ApiError
from tests.server.running import running

SECRET = "sk-a-key-that-nobody-guesses"
PLAIN: Any = {"prompt": "hi", "max_tokens": 2}


def test_without_keys_every_key_is_accepted_on_loopback() -> None:
    keyring = Keyring()
    for header in (None, "", "Bearer anything", "nonsense"):
        assert keyring.identify(header).name == "anybody"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {SECRET}",
        SECRET,
        f"Bearer {SECRET}x",
        f"Bearer {SECRET[:-1]}",
        "Bearer \ud800",
    ],
    ids=repr,
)
def test_a_wrong_key_is_refused_and_never_shown(header: str | None) -> None:
    keyring = Keyring([(SECRET, Caller("team", "team"))])
    with pytest.raises(ApiError) as refused:
        keyring.identify(header)
    assert refused.value.status == 401
    assert refused.value.code == "invalid_api_key"
    assert SECRET not in refused.value.message


def test_the_right_key_is_its_holder_however_the_scheme_is_spelled() -> None:
    keyring = Keyring([("another-long-key", Caller("other", "other")), (SECRET, Caller("team", "team"))])
    for header in (f"Bearer {SECRET}", f"bearer {SECRET}", f"BEARER  {SECRET} "):
        assert keyring.identify(header).name == "team"


def test_every_endpoint_but_the_open_ones_needs_the_key_and_a_strangers_body_is_not_read() -> None:
    with running(keys=[(SECRET, Caller("team", "team"))]) as server:
        for path in ("/health", "/version", "/metrics", "/openapi.json"):
            assert server.get(path).status_code == 200
        for path in ("/v1/models", "/v1/requests/x", "/nothing", "/v1/embeddings"):
            assert server.get(path).status_code == 401
        refused = server.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
        assert refused.status_code == 401
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong-key-wrong-key").models.list()
        assert [model.id for model in server.client(SECRET).models.list()] == ["dry run"]


def test_a_file_of_plain_keys_has_one_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\n\nfirst-long-key\n  second-long-key  \n")
    assert [(secret, caller.name) for secret, caller in read_key_file(path)] == [
        ("first-long-key", "key"),
        ("second-long-key", "key-2"),
    ]


def test_a_toml_file_says_what_each_key_may_do(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        '[[key]]\nkey = "first-long-key"\nname = "chat"\npriority = 0\n'
        '[[key]]\nkey = "second-long-key"\nname = "bulk"\nceiling = 20\nmax_concurrent = 4\n'
    )
    assert [caller for _, caller in read_key_file(path)] == [
        Caller("chat", "chat", default_priority=0),
        Caller("bulk", "bulk", ceiling=20, max_concurrent=4),
    ]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "nonsense",
        "key = 5",
        "[[key]]\n",
        "[[key]]\nkey = 5",
        f'[[key]]\nkey = "{SECRET}"\npriority = 101',
        f'[[key]]\nkey = "{SECRET}"\npriority = true',
        f'[[key]]\nkey = "{SECRET}"\nmax_concurrent = 0',
        f'[[key]]\nkey = "{SECRET}"\nmood = "good"',
        f'[[key]]\nkey = "{SECRET}"\nname = ""',
        f'[[key]]\nkey = "{SECRET}" trailing',
    ],
)
def test_a_wrong_key_file_is_told_without_showing_a_key(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        read_key_file(path)
    assert SECRET not in str(refused.value)
    assert "keys.toml" in str(refused.value)


def test_a_short_key_a_doubled_key_and_a_doubled_name_are_refused() -> None:
    team = Caller("team", "team")
    with pytest.raises(ConfigError, match="at least 8"):
        Keyring([("short", team)])
    with pytest.raises(ConfigError, match="twice"):
        Keyring([(SECRET, team), (SECRET, Caller("other", "other"))])
    with pytest.raises(ConfigError, match="same name"):
        Keyring([(SECRET, team), (SECRET + "2", team)])


def test_an_address_that_others_can_reach_needs_keys_or_a_clear_word() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.com"):
        with pytest.raises(ConfigError, match="no API keys"):
            make_keyring(ServerOptions(host=host))
        make_keyring(ServerOptions(host=host, allow_anybody=True))
        make_keyring(ServerOptions(host=host, keys=(SECRET,)))
    for host in ("127.0.0.1", "127.0.0.53", "::1", "localhost"):
        make_keyring(ServerOptions(host=host))


def test_a_strange_host_name_is_refused_so_that_no_web_page_reaches_a_server_without_keys_by_a_name_of_its_own() -> (
    None
):
    with running(server={"allowed_hosts": ("my.box",)}) as server:
        for host in ("localhost", "localhost:8000", "127.0.0.1", "[::1]:80", "my.box", "my.box:1"):
            assert server.get("/v1/models", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
            assert server.get("/v1/models", headers={"Host": host}).status_code == 403, host
    with running(keys=[(SECRET, Caller("team", "team"))]) as server:  # whoever has a key may call it what he likes
        headers = {"Host": "evil.example", "Authorization": f"Bearer {SECRET}"}
        assert server.get("/v1/models", headers=headers).status_code == 200


def test_web_pages_of_other_origins_may_not_ask_unless_they_are_named() -> None:
    with running() as server:
        own = server.url
        assert server.get("/v1/models", headers={"Origin": own}).status_code == 200
        refused = server.post("/v1/completions", PLAIN, headers={"Origin": "https://evil.example"})
        assert refused.status_code == 403
        assert "access-control-allow-origin" not in refused.headers
    with running(server={"allowed_origins": ("https://good.example",)}) as server:
        good = {"Origin": "https://good.example"}
        answer = server.post("/v1/completions", PLAIN, headers=good)
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert server.post("/v1/completions", PLAIN, headers={"Origin": "https://evil.example"}).status_code == 403


def test_a_web_page_that_is_named_may_ask_a_server_with_keys_and_can_read_what_is_wrong() -> None:
    # Goal: a browser asks first, without the key; a refusal that names no origin is a network error to the page.
    origin = {"Origin": "https://good.example"}
    first = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with running(keys=[(SECRET, Caller("team", "team"))], server={"allowed_origins": (origin["Origin"],)}) as server:
        asked = httpx.options(f"{server.url}/v1/completions", headers=first)
        assert asked.status_code == 200
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        for headers, status in ((origin, 401), ({**origin, "Authorization": f"Bearer {SECRET}"}, 200)):
            answer = server.post("/v1/completions", PLAIN, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == origin["Origin"]
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


def test_prompts_are_logged_where_the_operator_asked_for_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running(server={"logs_prompts": True}) as server:
        server.post("/v1/completions", {"prompt": "what-was-asked", "max_tokens": 2})
        chat = {"messages": [{"role": "user", "content": "what-was-said"}], "max_tokens": 2}
        server.post("/v1/chat/completions", chat)
    said = [record.fields["prompt"] for record in caplog.records if record.name == "giveway.server.prompt"]  # type: ignore[attr-defined]
    assert said[0] == "what-was-asked"
    assert "what-was-said" in said[1]


def test_neither_keys_nor_prompts_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with running(keys=[(SECRET, Caller("team", "team"))]) as server:
        headers = {"Authorization": f"Bearer {SECRET}"}
        secret_prompt = "the-secret-of-the-prompt"
        server.post("/v1/completions", {"prompt": secret_prompt, "max_tokens": 2}, headers=headers)
        server.post("/v1/completions", {"prompt": secret_prompt, "max_tokens": "x"}, headers=headers)
        server.post("/v1/completions", {"prompt": secret_prompt}, headers={"Authorization": f"Bearer {SECRET}x"})
    assert SECRET not in caplog.text
    assert secret_prompt not in caplog.text
