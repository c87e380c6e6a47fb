"""What is not installed is said in one line that names the extra to install."""

import os
import subprocess
import sys
import textwrap


def test_modules_that_need_an_extra_name_it():
    code = """
        import importlib, sys
        for name in ("lm_eval", "lightning", "pytorch_lightning"):
            sys.modules[name] = None  # as if it were not there
        for module in ("nopad.inference.harness", "nopad.trainer.with_lightning"):
            try:
                importlib.import_module(module)
            except ImportError as missing:
                print(missing)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines() == [
        "lm-eval is not installed: pip install 'nopad[eval]'",
        "lightning is not installed: pip install 'nopad[lightning]'",
    ]
