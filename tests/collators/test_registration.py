"""Importing the collators is enough for Transformers to know attn_implementation="nopad"."""

import textwrap

import warm_python


def test_a_process_that_only_imports_the_collators_knows_the_name():
    program = textwrap.dedent("""
        import nopad.collators
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        assert "nopad" in ALL_ATTENTION_FUNCTIONS.valid_keys()
        size = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        config = LlamaConfig(**size, num_attention_heads=2, attn_implementation="nopad")
        model = LlamaForCausalLM(config)
        assert model.config._attn_implementation == "nopad"
        """)
    child = warm_python.run(["-c", program], loaded=warm_python.LIBRARIES)
    assert child.returncode == 0, child.stderr[-2000:]
