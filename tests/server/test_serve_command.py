"""`giveway serve` as its operator sees it: settings from files, variables and flags, and what it writes to its log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

from giveway.build_server import ServerOptions
from giveway.cli.__main__ import main
from giveway.options import EngineOptions
from tests.server.running import ANY_TIME_S
from tests.server.test_lifecycle import process

CONFIG = """
device = "dry"
max_num_seqs = 3
num_kv_blocks = 64

[serve]
port = 0
served_model_name = ["house-model", "other-name"]
max_queued = 50
max_queued_by_class = { flex = 7, night = 9 }
drain_timeout_s = 3.5
max_body_size = "2MiB"
default_priority = 15

[serve.classes]
priority = 0
default = 5
flex = 40
batch = 60
night = 80
"""


Asked = list[tuple[EngineOptions, ServerOptions]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the command would serve, instead of serving it; this process keeps its log as it is."""
    calls: Asked = []

    def take(options: EngineOptions, server_options: ServerOptions) -> int:
        calls.append((options, server_options))
        return 0

    monkeypatch.setattr("giveway.cli.serving.serve", take)
    monkeypatch.setattr("giveway.cli.serving.begin_logging", lambda *_: None)
    return calls


def test_a_file_a_variable_and_a_flag_each_win_over_the_one_before(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(CONFIG)
    for name, value in (("MAX_QUEUED", "55"), ("DRAIN_TIMEOUT_S", "9")):
        monkeypatch.setenv(f"GIVEWAY_{name}", value)
    assert main(["serve", "--config", str(path), "--keep-alive-s", "2", "--max-queued", "60"]) == 0
    ((options, server),) = asked
    assert (options.device, options.max_num_seqs, options.default_priority) == ("dry", 3, 15)
    assert server.served_names == ("house-model", "other-name")
    assert dict(server.classes.entries) == {"priority": 0, "default": 5, "flex": 40, "batch": 60, "night": 80}
    assert server.limits.max_queued_of == {"flex": 7, "night": 9}
    assert server.limits.max_body_bytes == 2 << 20
    assert (server.limits.max_queued, server.limits.keep_alive_s, server.drain_timeout_s) == (60, 2.0, 9.0)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[serve]\nmax_qeued = 1\n", "Did you mean max_queued?"),
        ("[serve]\nport = 70000\n", "65535"),
        ("[serve.classes]\npriority = 0\n", "default"),
        ("[serve.classes]\npriority = 5\ndefault = 1\nflex = 20\nbatch = 30\n", "above the one before"),
        ("[serve.max_queued_by_class]\nnobody = 1\n", "nobody"),
        ("[serve]\nhost = '0.0.0.0'\n", "API keys"),
        ("[serve]\nkeep_alive_s = 0\n", "keep_alive_s"),
        ("port = 1\n", "[serve]"),
    ],
)
def test_a_wrong_setting_is_told_before_anything_is_loaded(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(content)
    command = [sys.executable, "-m", "giveway", "serve", "--config", str(path), "--model", "no-such-model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ANY_TIME_S, check=False)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_on_the_command_line_is_warned_of_and_not_shown(tmp_path: Path) -> None:
    key = "a-key-on-the-line"
    with process("--device", "dry", "--api-key", key, "--log-format", "json", directory=tmp_path) as (server, url):
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        server.terminate()
        assert server.wait(ANY_TIME_S) == 0
        assert server.stderr is not None
        log = server.stderr.read()
    warnings = [each for each in map(json.loads, log.splitlines()) if each["level"].lower() == "warning"]
    assert any("list of processes" in each["message"] for each in warnings)
    assert key not in log


def test_background_steps_are_always_kept_short_for_the_default_class_unless_something_else_is_said(
    asked: Asked,
) -> None:
    for flags, expected in (
        ([], 10),
        (["--default-priority", "4"], 4),
        (["--default-priority", "4", "--most-urgent-priority", "0"], 0),
    ):
        assert main(["serve", "--device", "dry", *flags]) == 0
        assert asked[-1][0].most_urgent_priority == expected


def test_a_configured_server_serves_its_classes_asks_for_its_key_and_logs_no_prompt(tmp_path: Path) -> None:
    # Goal: the whole way, from a file and a variable to answers and to one line of JSON for each request that ended.
    path, secret, key = tmp_path / "serve.toml", "the-prompt-is-nobodys-business", "key-from-a-variable"
    path.write_text(CONFIG)
    flags = ("--config", str(path), "--log-format", "json")
    with process(*flags, directory=tmp_path / "data", GIVEWAY_API_KEY=key) as (server, url):
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="another-key", max_retries=0).models.list()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=ANY_TIME_S)
        assert [each.id for each in client.models.list().data] == ["house-model", "other-name"]
        tiers = []
        for extra in ({"priority": 3}, {"priority": 39}, {"service_tier": "flex"}, {"priority": 99}, {}):
            answer = client.chat.completions.create(
                model="other-name",
                messages=[{"role": "user", "content": secret}],
                max_tokens=3,
                user="someone",
                extra_body=extra,
            )
            assert answer.model == "house-model"
            tiers.append(answer.service_tier)
        assert tiers == ["priority", "default", "flex", "flex", "default"]
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="house-model", prompt=secret, max_tokens=10**9)
        told = httpx.get(f"{url}/metrics", timeout=ANY_TIME_S).text
        assert 'giveway:requests_accepted_total{engine="0",model_name="house-model",priority_class="night"} 1.0' in told
        client.close()
        server.terminate()
        assert server.wait(ANY_TIME_S) == 0
        assert server.stderr is not None
        log = server.stderr.read()
    lines = [json.loads(each) for each in log.splitlines()]
    ended = [each for each in lines if each["message"] == "request finished"]
    assert [each["class"] for each in ended] == ["priority", "default", "flex", "night", "default"]
    assert [each["priority"] for each in ended] == [3, 39, 40, 99, 15]
    assert all((each["status"], each["output_tokens"]) == (200, 3) for each in ended)
    assert len({each["id"] for each in ended}) == 5
    assert secret not in log
    assert key not in log
    assert "list of processes" not in log
