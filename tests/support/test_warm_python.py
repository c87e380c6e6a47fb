"""Processes of the server are those that `subprocess` would start."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import warm_python


@pytest.mark.parametrize(
    "code",
    [
        "print(sys.argv[1:], os.environ['WORD'], os.getcwd(), input())",
        "sys.exit(3)",
        "sys.exit('no')",
        "1 / 0",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "signal.raise_signal(signal.SIGINT)",
        "import atexit; atexit.register(print, 'at the end')",
    ],
)
def test_it_ends_and_says_what_a_new_python_would(code, tmp_path):
    command = ["-c", f"import os, signal, sys; {code}", "a b"]
    settings = {"env": {"WORD": "x"}, "cwd": tmp_path, "input": "y\n", "timeout": 200}
    ours = warm_python.run(command, **settings)
    new = subprocess.run([sys.executable, *command], text=True, capture_output=True, **settings)
    assert (ours.returncode, ours.stdout) == (new.returncode, new.stdout)
    assert ours.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


def test_it_is_a_process_of_its_own_that_can_be_killed():
    child = warm_python.Popen(
        ["-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
    )
    assert child.stdout.readline() == f"{child.pid}\n" and child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.kill()
    assert child.communicate(200) == ("", "") and child.returncode == -signal.SIGKILL


def test_scripts_and_modules_are_main(tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside; print(__name__, __file__, sys.argv[1:], beside.WORD)")
    for command, folder in (([script, "1"], None), (["-m", "script", "1"], tmp_path)):
        done = warm_python.run(command, cwd=folder, timeout=200)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"__main__ {script} ['1'] found\n"
