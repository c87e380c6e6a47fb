"""What is not installed is said in one line that names the extra to install."""

import textwrap

import warm_python


def test_modules_that_need_an_extra_name_it():
    code = """
        import importlib, sys
        for name in ("lm_eval", "lightning", "pytorch_lightning", "trl"):
            sys.modules[name] = None  # as if it were not there
        ours = ("inference.harness", "cli.lm_eval_command", "trainer.with_lightning")
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
        for command in (["lm_eval"], ["eval", "hub/name", "--tasks", "x"]):
            print(main(command))
    """
    out = warm_python.run(["-c", textwrap.dedent(code)], loaded=warm_python.LIBRARIES)
    assert out.returncode == 0, out.stderr
    lacking = "lm-eval is not installed: pip install 'nopad[eval]'"
    assert out.stdout.splitlines() == [
        lacking,
        lacking,
        "lightning is not installed: pip install 'nopad[lightning]'",
        "trl is not installed: pip install 'nopad[trl]'",
        "['Engine', 'PackedTrainer']",
        "2",
        "2",
    ]
    assert out.stderr.splitlines() == [f"nopad lm_eval: {lacking}", f"nopad eval: {lacking}"]
