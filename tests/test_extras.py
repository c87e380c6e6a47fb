"""What is not installed is said in one line that installs it."""

import textwrap

import warm_python


def test_modules_that_need_another_package_name_it():
    code = """
        import importlib, sys
        for name in ("lm_eval", "lightning", "pytorch_lightning", "trl", "uvicorn"):
            sys.modules[name] = None  # as if it were not there
        ours = ("inference.harness", "inference.endpoint", "trainer.with_lightning")
        for module in ours:
            try:
                importlib.import_module(f"nopad.{module}")
            except ImportError as missing:
                print(missing)
        try:
            from nopad import PackedSFTTrainer
        except ImportError as missing:
            print(missing)
        from nopad import *
        from nopad.trainer.with_hf import *
        print(sorted({"Engine", "PackedTrainer", "PackedSFTTrainer", "PackedCallback"} & {*dir()}))
        from nopad.__main__ import main
        print(main(["eval", "hub/name", "--tasks", "x"]))
    """
    out = warm_python.run(["-c", textwrap.dedent(code)], loaded=warm_python.LIBRARIES)
    assert out.returncode == 0, out.stderr
    lacking = "lm-eval is not installed: pip install lm-eval"
    assert out.stdout.splitlines() == [
        lacking,
        "starlette and uvicorn are not installed: pip install nopad[serve]",
        "lightning is not installed: pip install lightning",
        "trl is not installed: pip install trl",
        "['Engine', 'PackedTrainer']",
        "2",
    ]
    assert out.stderr.splitlines() == [f"nopad eval: {lacking}"]
