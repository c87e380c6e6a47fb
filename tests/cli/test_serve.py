"""`nopad serve`: a checkpoint behind HTTP, until a signal."""

from __future__ import annotations

import signal
import subprocess

import httpx
import pytest
import warm_python
from nopad.__main__ import main
from small_checkpoint import save_checkpoint


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_checkpoint_is_served_until_a_signal(tmp_path, sent, status):
    save_checkpoint(tmp_path / "small")
    command = ["-m", "nopad", "serve", tmp_path / "small", "--port", "0", "--device", "cpu"]
    child = warm_python.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        first, second = child.stdout.readline(), child.stdout.readline()
        url = first.removeprefix("serving small at ").strip()
        token = second.removeprefix("token: ").strip()
        assert url.startswith("http://127.0.0.1:") and len(token) >= 32
        body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 3
        with httpx.stream(
            "POST",
            f"{url}/completions",
            json={"prompt": "hi", "max_tokens": 50, "ignore_eos": True, "stream": True},
            headers=headers,
            timeout=60,
        ) as running:
            lines = running.iter_lines()
            next(lines)
            child.send_signal(sent)
            assert [*lines][-2] == "data: [DONE]", "requests are finished first"
        _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == status and "Traceback" not in errors, errors


def test_what_cannot_be_served_is_one_line(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "nowhere")]) == 2
    assert "nopad serve: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve"])
